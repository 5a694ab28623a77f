"""In-process restart under nvrx-launch: in the journal; and what it can't save is restarted in the job."""

from __future__ import annotations

from functools import partial

import pytest
from harness import RANK
from launchers import LaunchedJob

from nvrx_slurm import journal

Jobs = partial[LaunchedJob]

SCRIPT = (
    RANK
    + """
from datetime import timedelta

from nvrx_slurm.inprocess import CallWrapper, Wrapper
from nvrx_slurm.inprocess.completion import Completion

class Hangs(Completion):
    def __call__(self, state):
        while True:
            time.sleep(0.01)

@Wrapper(
    soft_timeout=timedelta(seconds=2),
    hard_timeout=timedelta(seconds=4),
    completion=Hangs() if cycle == 1 and rank == 1 else None,
)
def train(call: CallWrapper):
    call.store.barrier(f"begin{call.iteration}", 2)
    if cycle == 0 and call.iteration == 0 and rank == 1:
        raise ValueError("can be saved in place")
    if cycle == 0 and call.iteration == 1 and rank == 0:
        # What a rank tells just before its end may come after the cycle's.
        while "inprocess_restart" not in open(os.environ["NVRX_RUN_DIR"] + "/journal.jsonl").read():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if cycle == 0:
        while True:
            time.sleep(0.01)

train()
"""
)


def test_a_fault_is_healed_in_process_and_a_death_or_a_hang_by_the_next_cycle(launched: Jobs) -> None:
    job = launched(SCRIPT, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", real_torch=True)
    job.launch("n1", TORCH_CPP_LOG_LEVEL="error")
    assert job.code(patience_s=100) == 0, job.stderr
    (restart,) = job.events(journal.InprocessRestart)
    assert restart.iteration == 1
    assert (
        restart.why
        == "Interruption.EXCEPTION affecting ranks {1} (rank 1: ValueError: can be saved in place)"
    )
    assert restart.ranks == [1]
    assert (restart.terminated, restart.world_size) == (0, 2)
    assert sum(restart.phases_s.values()) == pytest.approx(restart.took_s, abs=1e-6)
    assert "restarted in process, iteration 1" in job.stderr
    # The agent's is the one decision on a death, and it alone costs of the budget.
    assert len(job.events(journal.CycleStarted)) == 3
    faults = job.events(journal.FaultDetected)
    assert faults[0].signal == "SIGKILL"
    # And what a supervisor kills its rank for is told by both, for the rank can't.
    (hang,) = [fault for fault in faults if fault.kind is journal.FaultKind.HANG]
    assert (hang.rank, hang.detail) == (1, "completion has not returned for 4 s")
    assert "rank 1 is killed: completion has not returned for 4 s" in job.stderr
    assert job.nothing_is_left()
