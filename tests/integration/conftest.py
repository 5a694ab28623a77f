from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LocalJob, local_jobs

# A shell that runs the tests in the background has them ignore these, nohup SIGHUP, and so do all processes
# that they start; slurmstepd starts tasks without.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    """Make jobs of nvrx-srun on this machine, see :class:`harness.LocalJob`; they are gone afterwards."""
    with local_jobs(tmp_path) as make:
        yield make
