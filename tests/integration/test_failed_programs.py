"""A rank whose program fails is a failed rank, whatever the program has put in its own way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import RANK, LocalJob

from nvrx_slurm import journal

Jobs = Callable[..., LocalJob]


@pytest.fixture(name="jobs")
def _jobs(job: Jobs) -> Jobs:
    return job


FAILURES = {
    "os._exit that returns": ("os._exit = lambda code: None\nraise ValueError", 1),
    "threads whose end is waited for in vain": (
        """
import threading
def end(): raise SystemExit(0)
threading._shutdown = end
sys.exit(3)
""",
        3,
    ),
    "an exit handler that leaves with 0": (
        "import atexit\natexit.register(lambda: sys.exit(0))\nraise ValueError",
        1,
    ),
    "last words that cannot be said": (
        """
class Words:
    def __str__(self): raise RuntimeError
sys.exit(Words())
""",
        1,
    ),
    "an exception that cannot be said": (
        """
class Unspeakable(Exception):
    def __str__(self): raise RuntimeError
raise Unspeakable
""",
        1,
    ),
    "a hook that fails": (
        """
def hook(*_): raise RuntimeError("the hook")
sys.excepthook = hook
raise ValueError("the program")
""",
        1,
    ),
    "a folder where its error should be": ('os.mkdir(os.environ["TORCHELASTIC_ERROR_FILE"])\nsys.exit(3)', 3),
}


@pytest.mark.parametrize(("program", "code"), FAILURES.values(), ids=FAILURES.keys())
def test_the_job_fails_with_the_rank_and_shows_no_frame_of_ours(jobs: Jobs, program: str, code: int) -> None:
    job = jobs(RANK + program, "--max-restarts", "0", ranks=1)
    assert job.run() == 1, job.stderr
    (fault,) = job.events(journal.FaultDetected)
    assert (fault.kind, fault.exit) == (journal.FaultKind.EXIT, code)
    assert "nvrx_slurm" not in job.log("rank_0")
    assert job.nothing_is_left()


def test_a_hook_that_fails_hides_nothing(jobs: Jobs) -> None:
    program, _ = FAILURES["a hook that fails"]
    job = jobs(RANK + program, "--max-restarts", "0", ranks=1)
    assert job.run() == 1
    assert "ValueError: the program" in job.log("rank_0")


@pytest.mark.parametrize("end", ["raise ValueError('child')", "sys.exit(3)"])
def test_a_child_that_the_program_forked_may_fail(jobs: Jobs, end: str) -> None:
    program = f"""
child = os.fork()
if child == 0:
    {end}
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) in (1, 3)
time.sleep(1)
"""
    job = jobs(RANK + program, "--max-restarts", "0", ranks=1)
    assert job.run() == 0, job.stderr
    assert not job.events(journal.FaultDetected)
