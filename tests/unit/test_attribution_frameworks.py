"""Whole logs as frameworks, schedulers, kernels and file systems write them, labelled before a first run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nvrx_slurm.attribution.attribute import conclude
from nvrx_slurm.attribution.evidence import CycleEvidence
from nvrx_slurm.attribution.logs.finding import Source
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner
from nvrx_slurm.attribution.verdict import Attribution

RULES = load_rules()
_DATA: dict[str, Any] = yaml.load(
    (Path(__file__).parent / "data/attribution_frameworks.yaml").read_text(),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)


def judge(text: str) -> Attribution:
    scanner = LogScanner(Source(Path("job.log")), RULES)
    scanner.feed(text.encode())
    return conclude(CycleEvidence(), RULES, [scanner.finish()], now=1000.0)


def name_of(case: dict[str, Any]) -> str:
    return str(case["name"]).replace(" ", "-")


@pytest.mark.parametrize("case", _DATA["failing"], ids=name_of)
def test_the_first_cause_is_found_and_no_node_is_left_out_for_what_programs_print(
    case: dict[str, Any],
) -> None:
    result = judge(case["log"])
    primary = result.choice.primary
    assert (primary.family.id if primary else "unknown") in case["primary"].split("|"), primary
    assert result.decision.exclude == ()


@pytest.mark.parametrize("case", _DATA["healthy"], ids=name_of)
def test_a_healthy_log_with_words_of_failures_blames_nobody(case: dict[str, Any]) -> None:
    result = judge(case["log"])
    assert result.choice.primary is None
    assert result.culprits == ()
