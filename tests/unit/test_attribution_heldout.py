"""Lines and logs that were labelled before the rules were tried on them: kinds are known, not lines."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from shared_data import shared_data

from nvrx_slurm.attribution.attribute import conclude
from nvrx_slurm.attribution.evidence import CycleEvidence
from nvrx_slurm.attribution.logs.finding import Source
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner, Scan
from nvrx_slurm.attribution.verdict import Attribution

RULES = load_rules()
_DATA: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data/attribution_heldout.yaml").read_text())
LINES = [(kinds, line) for kinds, text in _DATA["lines"].items() for line in text.splitlines()]
LABELLED = shared_data("failure_lines.json")


def scan(text: str) -> Scan:
    scanner = LogScanner(Source(Path("job.log")), RULES)
    scanner.feed(text.encode() + b"\n")
    return scanner.finish()


def judge(text: str) -> Attribution:
    return conclude(CycleEvidence(), RULES, [scan(text)], now=1000.0)


def test_every_line_is_of_its_kind_to_the_rules_and_to_the_scan() -> None:
    wrong = []
    for kinds, line in LINES:
        family = RULES.classify(line)
        found = [finding.family.id for finding in scan(line).findings]
        if family is None or family.id not in kinds.split("|") or found != [family.id]:
            wrong.append((kinds, family and family.id, found, line))
    assert wrong == []
    assert len(LINES) > 350


def test_no_line_of_a_healthy_job_is_a_cause() -> None:
    wrong = []
    for line in _DATA["harmless"].splitlines():
        family = RULES.classify(line)
        found = [finding.family.id for finding in scan(line).findings if finding.family.decides]
        if found or (family is not None and family.decides):
            wrong.append((family and family.id, found, line))
    assert wrong == []


def test_a_log_of_nothing_but_harmless_lines_has_no_cause() -> None:
    assert judge(_DATA["harmless"]).choice.primary is None


@pytest.mark.parametrize("case", _DATA["cases"], ids=lambda case: case["name"].replace(" ", "-"))
def test_the_first_cause_of_a_log_is_found(case: dict[str, Any]) -> None:
    result = judge(case["log"])
    primary = result.choice.primary
    assert (primary.family.id if primary else "unknown") in case["primary"].split("|"), primary
    if "rank" in case:
        assert [culprit.rank for culprit in result.culprits] == [case["rank"]]
    assert result.decision.exclude == ()


SEQUENCES = [
    ("E070 E082 E080", "host.segfault"),
    ("E078 E086 E072", "mem.host_oom"),
    ("E021 E059 E085", "gpu.ecc_uncorrectable"),
    ("E123 E060", "num.nan"),
    ("E103 E109", "storage.no_space"),
    ("E137 E141 E142", "slurm.time_limit"),
    ("E139 E141 E138", "slurm.node_fail"),
    ("E035 E036", "unknown"),
    ("E071 E082 E085", "gloo.timeout"),
]


@pytest.mark.skipif(not LABELLED.is_file(), reason=f"the labelled lines are not at {LABELLED}")
@pytest.mark.parametrize(("ids", "category"), SEQUENCES)
def test_the_first_cause_of_labelled_lines_is_found_in_any_order(ids: str, category: str) -> None:
    lines = {case["id"]: case["line"] for case in json.loads(LABELLED.read_text())}
    for order in itertools.permutations(ids.split()):
        assert judge("\n".join(lines[one] for one in order)).family.id == category, order
