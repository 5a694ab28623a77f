"""The JSON document that other tools read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_journals import START, requeued, three_faults

from nvrx_slurm.report import Phase, build_report, document
from nvrx_slurm.report.document import encode

DATA = Path(__file__).parent / "data"
DOCS = Path(__file__).parents[2] / "docs"


def keys(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for key, inner in value.items():
                yield key
                yield from keys(inner)
        case list():
            for inner in value:
                yield from keys(inner)


def test_the_document_is_the_golden_file() -> None:
    golden = DATA / "report_three_faults.json"
    shown = encode(build_report(three_faults(), START + 1000.0))
    if os.environ.get("NVRX_UPDATE_GOLDEN"):
        golden.write_bytes(shown)
    assert shown == golden.read_bytes()


def test_it_says_which_schema_it_follows() -> None:
    assert document(build_report([], START))["schema"] == "nvrx.report.v1"


def test_an_empty_journal_has_the_same_keys() -> None:
    assert set(document(build_report([], START))) == set(document(build_report(three_faults(), START)))


def test_shares_add_up_and_name_every_phase() -> None:
    time = json.loads(encode(build_report(requeued(), START)))["time"]
    assert set(time["shares"]) == {phase.value for phase in Phase}
    assert sum(time["shares"].values()) == pytest.approx(1.0, abs=1e-5)


def test_every_key_is_documented() -> None:
    page = (DOCS / "report.md").read_text()
    told = set(re.findall(r"`([a-z_]+)`", page))
    used = set(keys(document(build_report(three_faults(), START)))) | set(
        keys(document(build_report(requeued(), START)))
    )
    assert used - told == set()
