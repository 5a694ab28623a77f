from __future__ import annotations

from pathlib import Path

import pytest

_UNIT = Path(__file__).parent / "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep each file of tests with real processes in one process: they take turns on names and clusters."""
    for item in items:
        if not item.path.is_relative_to(_UNIT):
            # Launchers of one host know each other by the job's name.
            group = "launch" if item.path.stem.startswith("test_launch") else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))
