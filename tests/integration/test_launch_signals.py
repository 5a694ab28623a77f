"""Signals to launchers of ``nvrx-launch``: who saves, who is waited for, and with what code all end."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from harness import RANK
from launchers import COLD, LaunchedJob, meeting

from nvrx_slurm import journal

Jobs = partial[LaunchedJob]


SAVES = (
    RANK
    + """
def save(received, frame):
    write(f"got{rank}", received)
    wait_for("saved")
    print("saved", flush=True)
    sys.exit(0)

for sig in (signal.SIGTERM, signal.SIGINT):
    signal.signal(sig, save)
write(f"ready{rank}.{cycle}")
while True:
    time.sleep(0.1)
"""
)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_which_may_save_for_longer_than_a_restart_lets_them(
    launched: Jobs, sig: signal.Signals
) -> None:
    options = ("--standalone", *COLD, "--nproc-per-node", "2", "--workers-stop-timeout", "0.1")
    job = launched(SAVES, *options).launch()
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    job.launchers["n1"].send_signal(sig)
    assert [job.wait_for_file(f"got{rank}") for rank in (0, 1)] == [str(int(sig))] * 2
    job.touch("saved")
    assert job.code() == 128 + sig
    assert job.log("rank_0") == job.log("rank_1") == "saved\n"
    assert job.nothing_is_left()


def test_the_grace_of_a_signal_has_an_end(launched: Jobs) -> None:
    job = launched(SAVES, "--standalone", *COLD, "--term-timeout", "0.5").launch()
    job.wait_for_file("ready0.0")
    job.launchers["n1"].send_signal(signal.SIGTERM)
    assert job.code() == 143
    assert job.log("rank_0") == ""
    assert job.nothing_is_left()


def test_a_second_signal_does_not_wait(launched: Jobs) -> None:
    job = launched(SAVES, "--standalone", *COLD).launch()
    job.wait_for_file("ready0.0")
    job.launchers["n1"].send_signal(signal.SIGTERM)
    job.wait_for_file("got0")
    job.launchers["n1"].send_signal(signal.SIGTERM)
    assert job.code() == 143
    assert job.nothing_is_left()


def test_a_node_that_is_asked_to_go_lets_its_ranks_save_and_a_spare_takes_its_place(launched: Jobs) -> None:
    script = SAVES.replace("while True:", "while cycle == 0:")
    job = launched(script, *meeting("2:3"), "--max-restarts", "1").launch_all("n1", "n2", "n3")
    started = job.wait_for(journal.CycleStarted)
    victim = next(node for node in ("n2", "n3") if node in started.nodes)
    rank = started.nodes.index(victim)
    for each in (0, 1):
        job.wait_for_file(f"ready{each}.0")
    job.launchers[victim].send_signal(signal.SIGTERM)
    job.wait_for_file(f"got{rank}")
    job.touch("saved")
    codes = job.codes()
    assert codes.pop(victim) == 143
    assert set(codes.values()) == {0}, job.stderr


def test_sigusr2_asks_the_ranks_of_all_nodes_to_save(launched: Jobs) -> None:
    script = (
        RANK
        + """
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
write(f"ready{rank}.{cycle}")
while not client.should_stop():
    time.sleep(0.05)
"""
    )
    job = launched(script, *meeting("2")).launch_all("n1", "n2")
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    for node in ("n2", "n1"):
        job.launchers[node].send_signal(signal.SIGUSR2)
    assert job.codes() == {"n1": 75, "n2": 75}


def test_ranks_that_save_do_not_outlive_a_coordinator_that_is_killed(launched: Jobs) -> None:
    job = launched(SAVES, *meeting("2")).launch_all("n1", "n2")
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    job.launchers["n2"].send_signal(signal.SIGTERM)
    for rank in (0, 1):
        job.wait_for_file(f"got{rank}")
    job.named("nvrx-coord").kill()
    assert job.codes() == {"n1": 1, "n2": 143}
    assert job.nothing_is_left()


def test_a_node_waits_for_a_coordinator_that_starts_later_and_a_signal_ends_the_wait(launched: Jobs) -> None:
    job = launched("pass", *meeting("1:2"), "--token-file", "secret")
    (job.root / "secret").write_text("x" * 43)
    (job.root / "secret").chmod(0o600)
    job.launch("n2", "--rdzv-conf", "is_host=0")
    job.named("nvrx-agent", "n2")
    os.kill(job.launchers["n2"].pid, signal.SIGTERM)
    assert job.code("n2") == 143
    assert job.nothing_is_left()
