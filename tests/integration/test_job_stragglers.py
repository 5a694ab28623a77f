"""Slow ranks in a real job: told by the ranks, judged by the Coordinator, acted upon."""

from __future__ import annotations

import signal
from ast import literal_eval
from collections.abc import Callable

import pytest
from harness import LocalJob

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind

# Times that are told, not taken: what a busy machine does to them is the benchmark's affair.
RANK = """
import os, time
from nvrx_slurm.fault_tolerance.pace_channel import PaceChannel, SectionPeriod
from nvrx_slurm.pace.measured import Kernel, KernelTime

rank, node = int(os.environ["RANK"]), os.environ["GROUP_RANK"]
slow = os.environ["SLURMD_NODENAME"] == "n3"
os.environ["RANK"] = "0"  # as a restart within the process may have it
channel = PaceChannel.open()
assert channel is not None and channel.rank == rank, channel.rank
report = 0
while True:
    factor = 2.0 if slow else 1.0 + rank / 100
    told = channel.tell(
        {"load": SectionPeriod(10 * factor, 20, 1.0), "forward": SectionPeriod(50.0, 20, 1.0)},
        {Kernel("gemm", "forward"): KernelTime(100.0, 2000.0)},
        iterations=20,
    )
    assert told
    report += 1
    go = os.path.join(os.environ["TEST_FOLDER"], f"go{os.environ['TORCHELASTIC_RESTART_COUNT']}-{report}")
    if rank > 0:
        while not os.path.exists(go):
            time.sleep(0.01)
        continue
    while (scores := channel.scores()) is None:
        time.sleep(0.01)
    path = os.path.join(os.environ["TEST_FOLDER"], f"scores{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    load = dict(zip(scores.ranks, scores.relative[scores.sections.index("load")]))
    with open(path + ".new", "w") as file:
        file.write(repr((scores.report, load)))
    os.replace(path + ".new", path)
    open(go, "w").close()
"""


COLD = ("--warm-start", "off")
Jobs = Callable[..., LocalJob]


def test_the_node_of_a_slow_rank_makes_room_for_a_spare(job: Jobs) -> None:
    run = job(RANK, "--straggler-action", "exclude", "--spares", "1", *COLD, nodes=5, ranks=1).start()
    report, relative = literal_eval(run.wait_for_file("scores1"))
    assert report > 3, "history outlives the restart"
    assert relative == {
        0: 1.0,
        1: pytest.approx(1 / 1.01),
        2: pytest.approx(1 / 1.02),
        3: pytest.approx(1 / 1.03),
    }
    run.signal(signal.SIGTERM)
    assert run.wait() == 143

    slow = run.events(journal.StragglerReport)
    assert {(event.rank, event.node, event.section, event.told_by) for event in slow} == {
        (2, "n3", "load", None)
    }
    reports = [event.reports for event in slow]
    assert (reports[0], reports[-1]) == (2, 3), "never on a single report"
    assert slow[0].lost_ms == pytest.approx(10.0, abs=0.5)
    assert any(line.startswith("load ") for line in slow[0].context)
    (fault,) = run.events(journal.FaultDetected)
    assert (fault.kind, fault.node, fault.rank, fault.detector) == (FaultKind.SLOW, "n3", 2, "straggler")
    (excluded,) = run.events(journal.NodeExcluded)
    assert excluded.node == "n3"
    assert excluded.reason.startswith("rank 2 is slow: load takes ")
    first, second = run.events(journal.CycleStarted)
    assert (first.nodes, second.nodes) == (["n1", "n2", "n3", "n4"], ["n1", "n2", "n5", "n4"])
    scores = [event for event in run.events(journal.RankScores) if event.compared == 4]
    assert (scores[0].ranks[0], scores[0].scores[0], scores[0].compared) == (
        2,
        pytest.approx(0.5, abs=0.02),
        4,
    )
    assert "SLOW: rank 2 on n3: load takes " in run.stderr
    assert run.nothing_is_left()


def test_what_one_rank_says_of_another_is_told_and_nothing_else(job: Jobs) -> None:
    script = """
import os, time
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
if os.environ["RANK"] == "0":
    for _ in range(4):
        client.report_straggler(1, "step", 0.1, 900.0, 3, 3)
"""
    run = job(script, "--straggler-action", "exclude", "--spares", "1", *COLD, nodes=3, ranks=1)
    assert run.run() == 0
    told = run.events(journal.StragglerReport)
    assert {(event.rank, event.node, event.told_by) for event in told} == {(1, "n2", 0)}
    assert run.events(journal.FaultDetected) == run.events(journal.NodeExcluded) == []
