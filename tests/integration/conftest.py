from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LocalJob, local_jobs


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    """Make jobs of nvrx-srun on this machine, see :class:`harness.LocalJob`; they are gone afterwards."""
    with local_jobs(tmp_path) as make:
        yield make
