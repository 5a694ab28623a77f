"""The order of the tests, those that wait longest first, and names that all processes make alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples each time: whoever changes something else must not meet another's rare case.
# `pytest --hypothesis-profile=default` looks for new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

_HERE = Path(__file__).parent
_MINUTES = (
    "slurm/test_main_job.py",
    "slurm/test_standby.py",
    "slurm/test_returning_batch_host.py",
    "integration/test_lost_coordinator.py",
    "slurm/test_lost_batch_host.py",
)
"""Files that take several minutes."""
_FOLDERS = ("slurm", "integration", "unit")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path.relative_to(_HERE).as_posix()))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: what they hold may differ between processes, as gzip's time does."""
    return argname if isinstance(val, bytes) else None


def _place(path: str) -> tuple[int, int]:
    folder = path.partition("/")[0]
    return (
        _MINUTES.index(path) if path in _MINUTES else len(_MINUTES),
        _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS),
    )
