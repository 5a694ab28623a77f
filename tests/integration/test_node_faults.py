"""What a rank or its node does to the agent must stay a fault of that rank or node."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RANK, LocalJob, is_alive, until

from nvrx_slurm import journal

Jobs = Callable[..., LocalJob]
QUICK_STOP = ("--workers-stop-timeout", "300ms")


@pytest.fixture
def job(job: Jobs) -> Jobs:
    """Jobs with a number of their own: other tests may run beside these."""
    return functools.partial(job, SLURM_JOB_ID=str(os.getpid()))


CLIENT = (
    RANK
    + """
from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError

client = RankMonitorClient()
client.init_workload_monitoring()
page = os.environ["NVRX_HEARTBEAT_PAGE"]
"""
)


def test_a_rank_that_shortens_its_page_kills_itself_alone(job: Jobs) -> None:
    run = job(
        CLIENT
        + """
client.send_heartbeat(step=1)
if cycle == 0 and rank == 0:
    os.truncate(page, 0)
    wait_for("looked")
    client.send_heartbeat(step=2)
elif cycle == 0:
    write("beaten")
    time.sleep(60)
""",
        *QUICK_STOP,
    ).start()
    run.wait_for_file("beaten")
    run.touch("looked")
    assert run.wait() == 0
    assert [fault.signal for fault in run.events(journal.FaultDetected)] == ["SIGBUS"]
    assert run.events(journal.NodeLost) == []
    assert run.nothing_is_left()


def test_nothing_that_a_rank_sends_ends_its_agent_or_delays_another(job: Jobs) -> None:
    run = job(
        CLIENT
        + """
import socket

def connect():
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Its whole path may be longer than an address.
    os.chdir(os.path.dirname(os.environ["NVRX_RANK_SOCKET"]))
    channel.connect("ranks.sock")
    return channel

if cycle == 1:
    sys.exit(0)
if rank == 1:
    wait_for("flooded")
    time.sleep(0.3)
    write("failed", time.time())
    os._exit(3)
saved = '{"type":"Checkpoint","rank":0,"cycle":0,"what":"saved","layer":"a","step":%s}'
forged = connect()
for step in (2**63, 2**64, 2**70, -2**70):
    forged.send((saved % step).encode())
hb = '{"type":"TimeoutsChanged","rank":0,"cycle":0,"heartbeat":{"initial":%s},"section":{}}'
for value in ("-1", "0", "1e308"):
    forged.send((hb % value).encode())
for garbage in (b"x" * 60000, b"[" * 60000, bytes(range(256)), b"{}"):
    other = connect()
    other.send(garbage)
    assert other.recv(1) == b"", "it is closed"
forged.send((saved % 77).encode())
write("flooded")
for step in range(100_000):
    client.report_checkpoint_saved(step)
time.sleep(60)
""",
        *QUICK_STOP,
    ).start()
    assert run.wait() == 0
    assert run.events(journal.NodeLost) == []
    seen = next(r.ts for r in run.records if isinstance(r.event, journal.FaultDetected))
    assert seen - float(run.wait_for_file("failed")) < 15.0, "it is heard while the other goes on"
    steps = [event.step for event in run.events(journal.CheckpointSaved)]
    assert steps[0] == 77
    assert len(steps) < 200
    assert run.stderr.count("is no request, its connection is closed") == 1
    assert run.stderr.count("a value is out of range") == 1
    assert run.nothing_is_left()


def test_an_agent_that_is_stopped_leaves_no_rank_beside_the_next_cycle(job: Jobs) -> None:
    run = job(
        CLIENT
        + """
client.send_heartbeat(step=1)
write(f"beaten{rank}.{cycle}")
wait_for("end")
""",
        *QUICK_STOP,
        *("--spares", "1"),
        nodes=3,
        ranks=1,
    ).start()
    run.wait_for_file("beaten1.0")
    agent = run.named("nvrx-agent", "n2")
    agent.suspend()
    # A new agent comes to the node, but only when nothing of the old one is left.
    until("no rank of cycle 0 is left on n2", lambda: not run.ranks(1, cycle=0))
    run.wait_for_file("beaten0.1")
    run.touch("end")
    assert run.wait() == 0
    assert "the agent stands still: killed" in run.stderr
    assert run.nothing_is_left()


def test_a_node_that_is_suspended_and_resumed_keeps_its_agent(job: Jobs) -> None:
    run = job(CLIENT + 'write("began")\nwait_for("end")\n', *QUICK_STOP, ranks=1).start()
    run.wait_for_file("began")
    processes = run.processes()
    for process in processes:
        process.suspend()
    time.sleep(11)
    for process in reversed(processes):
        process.resume()
    time.sleep(6)
    assert "stands still" not in run.stderr
    assert all(is_alive(process) for process in processes if "guardian" in process.name())
    run.touch("end")
    run.wait()
    assert run.nothing_is_left()


def test_node_local_disk_may_have_a_path_longer_than_a_socket_may(job: Jobs, tmp_path: Path) -> None:
    local = tmp_path / ("long" * 30)
    local.mkdir()
    run = job(
        CLIENT + "client.send_heartbeat(step=1)\nsys.exit(3 if cycle == 0 else 0)\n",
        *QUICK_STOP,
        ranks=1,
        NVRX_NODE_LOCAL_TMPDIR=str(local),
    )
    assert run.run() == 0, run.stderr
    assert run.events(journal.FirstStep), "the rank reaches its agent"
    assert list(local.iterdir()) == []


@pytest.mark.parametrize("then", ["", "touch"])
def test_a_private_directory_that_is_cleared_or_blocked_costs_one_cycle(job: Jobs, then: str) -> None:
    run = job(
        CLIENT
        + f"""
import shutil

client.send_heartbeat(step=1)
if cycle == 0:
    folder = os.path.dirname(page)
    shutil.rmtree(folder)
    if {then == "touch"}:
        open(folder, "x").close()
    sys.exit(3)
write("second", page)
""",
        *QUICK_STOP,
        ranks=1,
    )
    (run.root / "tmp").mkdir()
    run.environment_of_agents(TMPDIR=str(run.root / "tmp"))
    assert run.run() == 0, run.stderr
    assert str(run.root / ("tmp" if then else "local")) in run.wait_for_file("second")
    assert run.events(journal.NodeLost) == []
    assert list((run.root / "tmp").iterdir()) == []
