from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from harness import LocalJob, local_jobs
from launchers import LaunchedJob, launched_jobs

# A shell that runs the tests in the background has them ignore these, nohup SIGHUP, and so do all processes
# that they start; slurmstepd starts tasks without.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., LocalJob]]:
    """Make jobs of nvrx-srun on this machine, see :class:`harness.LocalJob`; they are gone afterwards.

    What they have said is shown if the test fails.
    """
    with local_jobs(tmp_path) as make:
        yield make
        if request.node.stash.get(FAILED, False):
            for path in sorted(tmp_path.glob("job*/std*")) + sorted(tmp_path.glob("job*/run/*.log")):
                print(f"--- {path.relative_to(tmp_path)}\n{path.read_text(errors='replace')}")
            for path in sorted(tmp_path.glob("job*/run/*.jsonl")):
                print(f"--- {path.relative_to(tmp_path)}\n{path.read_text(errors='replace')}")


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., LaunchedJob]]:
    """Make jobs of nvrx-launch on this machine, see :class:`launchers.LaunchedJob`; then they are gone."""
    with launched_jobs(tmp_path) as make:
        yield make
