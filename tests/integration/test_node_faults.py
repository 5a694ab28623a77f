"""What a rank or its node does to the agent must stay a fault of that rank or node."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import pytest
from harness import RANK, LocalJob

from nvrx_slurm import journal

Jobs = Callable[..., LocalJob]
pytestmark = pytest.mark.timeout(90)
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
