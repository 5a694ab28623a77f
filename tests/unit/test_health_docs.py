"""docs/health.md says what the registry says."""

from __future__ import annotations

import re
from pathlib import Path

from health_world import CHECKS

from nvrx_slurm.health.config import parse_config
from nvrx_slurm.health.explain import keys, markdown_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "health.md"
_TABLE = re.compile(r"<!-- table: .*? -->\n(.*?)<!-- end -->", re.S)


def test_the_table_of_checks_is_that_of_the_registry() -> None:
    (found,) = _TABLE.findall(PAGE.read_text())
    assert found.splitlines() == list(markdown_table(CHECKS.values()))


def test_the_configuration_that_the_page_shows_is_accepted() -> None:
    (text,) = re.findall(r"```yaml\n(budget_s.*?)```", PAGE.read_text(), re.S)
    config = parse_config(text, "docs/health.md", CHECKS)
    assert config.of(CHECKS["gpu-throttle"]).mode == "off"


def test_every_key_of_every_check_is_described() -> None:
    assert not [(name, key.name) for name in CHECKS for key in keys(CHECKS[name]) if not key.description]
