from __future__ import annotations

from pathlib import Path

import pytest

_SLURM = Path(__file__).parent / "slurm"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file of tests on dev clusters in one process: they share a cluster, and take turns on it."""
    for item in items:
        if item.path.is_relative_to(_SLURM):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
