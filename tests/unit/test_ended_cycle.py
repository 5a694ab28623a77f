"""What a job's journal, history and run directory hold of a cycle that has been attributed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fr_world import World, tensor_and_data_parallel

from nvrx_slurm import journal
from nvrx_slurm.attribution.ended_cycle import attribute_ended_cycle
from nvrx_slurm.attribution.history import read_history
from nvrx_slurm.interpreter import command_for
from nvrx_slurm.journal import CycleAttributed, FaultKind, JournalWriter
from nvrx_slurm.journal.events import AnyEvent

ARGV = ["train.py"]
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 3, in <module>
    import no_such_module
ModuleNotFoundError: No module named 'no_such_module'
"""
SEGFAULT = journal.FaultDetected(kind=FaultKind.SIGNAL, node="n2", rank=1, signal="SIGSEGV", detector="child")
HANG = journal.FaultDetected(kind=FaultKind.HANG, node="n1", rank=0, detector="heartbeat")
EXIT = journal.FaultDetected(kind=FaultKind.EXIT, node="n2", rank=1, exit=1, detector="child")


class Run:
    """A run directory that is written cycle by cycle; two nodes with a rank each, or as many as asked."""

    def __init__(self, root: Path, ranks: int = 2) -> None:
        self.root = root
        self.ranks = ranks
        self.begins()

    def begins(self, job: str = "7", argv: list[str] = ARGV, attempt: int = 0, cycle: int = 0) -> Run:
        self._journal = JournalWriter(self.root / "journal.jsonl", job, attempt)
        self._journal.append(
            cycle,
            journal.JobStarted(
                nodes=["n1", "n2"],
                active_nodes=2,
                spares=0,
                max_restarts=9,
                argv=argv,
                host="n1",
                fence="",
                version="",
            ),
        )
        return self

    def cycle(self, number: int, *events: AnyEvent, log: str = "", rank: int = 1) -> CycleAttributed:
        """Write a cycle, and have it attributed."""
        each = self.ranks // 2
        started = journal.CycleStarted(world_size=self.ranks, nodes=["n1", "n2"], spares=[])
        placed = [
            journal.WorkersStarted(
                node=f"n{n + 1}", ranks=list(range(n * each, (n + 1) * each)), pids=[1] * each, warm=True
            )
            for n in range(2)
        ]
        for event in (started, *placed, *events):
            self._journal.append(number, event)
        folder = self.root / "cycles" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        stamp = "2026-01-02T03:00:00.000"
        lines = [f"{stamp} n2 rank {rank}: {line}\n" for line in log.splitlines()]
        (folder / "merged.log").write_text("".join(lines))
        return attribute_ended_cycle(self.root, number)


def test_the_journal_gets_the_cause_the_culprit_and_what_the_policy_would_do(tmp_path: Path) -> None:
    found = Run(tmp_path).cycle(0, EXIT, log=TRACEBACK)
    assert (found.category, found.action, found.rule) == ("code.import", "stop", "4-deterministic")
    assert found.where == "cycles/0/merged.log:4"
    assert found.excerpt == "ModuleNotFoundError: No module named 'no_such_module'"
    (culprit,) = found.culprits
    assert (culprit.kind, culprit.rank, culprit.node) == ("rank", 1, "n2")
    assert not found.exclude


def test_the_whole_of_it_stands_beside_the_cycles_logs_for_its_owner_alone(tmp_path: Path) -> None:
    found = Run(tmp_path).cycle(0, EXIT, log=TRACEBACK)
    document = tmp_path / found.file
    assert json.loads(document.read_text())["primary"]["category"] == "code.import"
    assert stat.S_IMODE(document.stat().st_mode) == 0o600
    assert [path.name for path in document.parent.iterdir() if path.name.startswith(".")] == []


def test_a_cause_that_repeats_is_counted_over_a_requeue(tmp_path: Path) -> None:
    run, text = Run(tmp_path), TRACEBACK.replace("ModuleNotFoundError: No module", "ValueError: bad")
    assert run.cycle(0, EXIT, log=text).action == "restart"
    run.begins(attempt=1, cycle=1)
    assert run.cycle(1, EXIT, log=text).rule == "7-repeated"
    assert [attempt.cycle for attempt in read_history(tmp_path)] == [0, 1]


def test_another_job_or_program_in_the_same_directory_begins_anew(tmp_path: Path) -> None:
    run, text = Run(tmp_path), TRACEBACK.replace("ModuleNotFoundError: No module", "ValueError: bad")
    run.cycle(0, EXIT, log=text)
    assert run.begins(job="8", cycle=1).cycle(1, EXIT, log=text).action == "restart"
    assert run.begins(job="8", argv=["other.py"], cycle=2).cycle(2, EXIT, log=text).action == "restart"
    assert run.cycle(3, EXIT, log=text).rule == "7-repeated"


def test_a_cycle_that_was_attributed_twice_counts_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.cycle(0, HANG)
    for number in range(2):
        attribute_ended_cycle(tmp_path, number * 0)
    # It may repeat twice, and has once.
    assert run.cycle(1, HANG).action == "restart"


XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."


def test_what_a_program_prints_excludes_no_node_however_often(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number in range(4):
        found = run.cycle(number, EXIT, log=f"{XID}\nsrun: error: Node failure on n1\nnode failure on n1\n")
        assert not found.exclude, number
        assert found.action != "restart_exclude"


def test_a_rank_that_traces_show_twice_costs_its_node_the_place(tmp_path: Path) -> None:
    programs = tensor_and_data_parallel(8, 4, 6)
    run = Run(tmp_path, ranks=8)
    for number in range(2):
        folder = tmp_path / "cycles" / str(number) / "flight_recorder"
        folder.mkdir(parents=True)
        World(programs, host_stops={5: 9}).write(folder)
        found = run.cycle(number, HANG)
        first = found.culprits[0]
        assert (first.rank, first.node, first.by_traces) == (5, "n2", True)
        assert found.exclude == ([] if number == 0 else ["n2"])


@pytest.mark.parametrize(("state", "rank"), [("T", 0), ("t", 0), ("S", 5), ("R", 5)])
def test_of_a_process_that_the_kernel_has_stopped_traces_show_only_who_waits_for_it(
    tmp_path: Path, state: str, rank: int
) -> None:
    folder = tmp_path / "cycles" / "0" / "flight_recorder"
    folder.mkdir(parents=True)
    World(tensor_and_data_parallel(8, 4, 6), host_stops={5: 9}).write(folder)
    stopped = journal.HangEvidence(
        node="n1",
        rank=0,
        pid=1,
        heartbeats=3,
        silent_s=5.0,
        sections={},
        process_state=state,
        seconds=0.1,
        file="",
    )
    found = Run(tmp_path, ranks=8).cycle(0, HANG, stopped)
    assert (found.culprits[0].rank, found.culprits[0].by_traces) == (rank, rank == 5)


def test_a_rank_that_dies_by_a_signal_twice_costs_its_node_the_place(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.cycle(0, SEGFAULT).exclude == []
    assert run.cycle(1, SEGFAULT).exclude == ["n2"]


FACTS = {
    "lack of memory": (FaultKind.OOM, "mem.host_oom", []),
    "a lost node": (FaultKind.NODE_LOST, "slurm.node_fail", ["n2"]),
    "a hang without traces": (FaultKind.HANG, "job.hang", []),
}


@pytest.mark.parametrize("what", FACTS)
def test_what_the_launcher_saw_outweighs_what_the_others_print_because_of_it(
    tmp_path: Path, what: str
) -> None:
    kind, category, exclude = FACTS[what]
    rank = None if kind is FaultKind.NODE_LOST else 1
    fault = journal.FaultDetected(kind=kind, node="n2", rank=rank, signal="SIGKILL", detector="child")
    found = Run(tmp_path).cycle(
        0, fault, log="RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer", rank=0
    )
    assert (found.category, found.culprits[0].node) == (category, "n2")
    assert found.exclude == exclude


def test_no_control_character_of_a_log_reaches_the_journal(tmp_path: Path) -> None:
    found = Run(tmp_path).cycle(0, EXIT, log="ValueError: \x1b]0;title\x07 \x1b[31mred")
    assert found.excerpt.isprintable()


STOPPED = {
    "scancel": ([journal.StopRequested(signal="SIGTERM")], "slurm.cancelled", "1-over"),
    "preemption": (
        [
            journal.StopRequested(signal="SIGTERM"),
            journal.StopRequested(signal="", why="a preemption by Slurm", preempted=True),
        ],
        "slurm.preempted",
        "2-requeued",
    ),
    "the time limit": (
        [journal.StopRequested(signal="", why="the time limit"), journal.StopRequested(signal="SIGTERM")],
        "slurm.time_limit",
        "3-time-limit",
    ),
    "the time limit, with a checkpoint": (
        [journal.CheckpointSaved(step=9, layer="shared", rank=0), journal.StopRequested(signal="", why="t")],
        "slurm.time_limit",
        "3-time-limit",
    ),
}


@pytest.mark.parametrize("how", STOPPED)
def test_a_job_that_is_asked_to_end_failed_of_nothing_that_its_ranks_say_then(
    tmp_path: Path, how: str
) -> None:
    events, category, rule = STOPPED[how]
    found = Run(tmp_path).cycle(0, *events, SEGFAULT, log="RuntimeError: Connection closed by peer\n")
    assert (found.category, found.rule) == (category, rule)
    assert (found.action == "restart") == ("checkpoint" in how)
    assert found.exclude == []


def test_a_fault_before_that_is_the_cause(tmp_path: Path) -> None:
    found = Run(tmp_path).cycle(0, SEGFAULT, journal.StopRequested(signal="SIGTERM"))
    assert found.category == "host.segfault"


def in_child(run_dir: Path, cycle: int, **environment: str) -> CycleAttributed:
    arguments = (str(run_dir), str(cycle), str(os.getpid()))
    command = command_for("nvrx_slurm.attribution.ended_cycle", *arguments)
    done = subprocess.run(command, capture_output=True, timeout=250, check=False, env=environment)
    return msgspec.json.decode(done.stdout, type=CycleAttributed)


FULL = """
import resource, sys, msgspec
from pathlib import Path
from nvrx_slurm.attribution.ended_cycle import attribute_ended_cycle
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.stdout.write(msgspec.json.encode(attribute_ended_cycle(Path(sys.argv[1]), 0)).decode())
"""


def test_a_run_directory_that_cannot_be_written_costs_the_record_and_not_the_verdict(tmp_path: Path) -> None:
    """No file may grow, as on a full disk: then above all the job is to be held."""
    Run(tmp_path).cycle(0, EXIT, log="OSError: [Errno 28] No space left on device: 'step_10.pt'\n")
    for path in (tmp_path / "cycles/0/attribution.json", *tmp_path.glob("attribution*")):
        path.unlink()
    argv = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, timeout=120, check=True)
    found = msgspec.json.decode(done.stdout, type=CycleAttributed)
    assert (found.category, found.action, found.file) == ("storage.no_space", "hold", "")
    assert "could not be kept in the run directory: File too large" in found.why
    assert not [path for path in tmp_path.rglob("*attribution*") if path.stat().st_size]


def test_the_child_tells_in_one_line_also_what_went_wrong(tmp_path: Path) -> None:
    Run(tmp_path).cycle(0, EXIT, log=TRACEBACK)
    assert in_child(tmp_path, 0).category == "code.import"
    (tmp_path / "rules.yaml").write_text("version: 7")
    rules = str(tmp_path / "rules.yaml")
    assert "version" in in_child(tmp_path, 0, NVRX_ATTRIBUTION_RULES=rules).failed
