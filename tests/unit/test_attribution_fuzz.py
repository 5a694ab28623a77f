"""Whatever bytes a log holds: they are read, in bounded time, and end in a document."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.attribution.attribute import conclude
from nvrx_slurm.attribution.evidence import CycleEvidence
from nvrx_slurm.attribution.logs.finding import Source, SourceKind
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner, Scan
from nvrx_slurm.attribution.render import render

RULES = load_rules()
_DATA = yaml.safe_load((Path(__file__).parent / "data/attribution_heldout.yaml").read_text())
_LINES = [line.encode() for text in _DATA["lines"].values() for line in text.splitlines()]
_FRONTS = [
    b"",
    b"[rank3]: ",
    b"2026-01-02T03:04:05.678 n1 rank 7: ",
    b"2026-13-99T77:88:99 ",
    b"\x1b[31m",
    b"[Mon Feb 31 25:61:61 2026] ",
    b"E1399 99:99:99.1 1 a/b.py:3] ",
    b"(Worker pid=1, ip=x) ",
    b"Traceback (most recent call last):",
    b'  File "',
    b"\r",
    b"\0",
    b"\xff\xfe",
]
_piece = st.one_of(st.binary(max_size=40), st.sampled_from(_LINES), st.sampled_from(_FRONTS), st.just(b"\n"))
MB = 1_000_000


def scan(data: bytes, kind: SourceKind = SourceKind.OUTPUT, size: int = 1 << 20, job: str = "") -> Scan:
    scanner = LogScanner(Source(Path("x.log"), kind, job=job), RULES)
    for at in range(0, len(data), size):
        scanner.feed(data[at : at + size])
    return scanner.finish()


@settings(max_examples=150, deadline=None)
@given(st.lists(_piece, max_size=60), st.sampled_from(list(SourceKind)), st.sampled_from(["", "12"]))
def test_any_bytes_end_in_a_document_and_a_report(pieces: list[bytes], kind: SourceKind, job: str) -> None:
    found = scan(b"".join(pieces), kind, job=job)
    result = conclude(CycleEvidence(), RULES, [found], now=1.0)
    json.dumps(result.document()).encode()
    assert render(result).renderables


@settings(max_examples=60, deadline=None)
@given(st.lists(_piece, max_size=40), st.integers(1, 97))
def test_it_does_not_matter_in_which_pieces_a_log_arrives(pieces: list[bytes], size: int) -> None:
    def told(found: Scan) -> list[tuple[object, ...]]:
        return [(f.family.id, f.line, f.count, f.excerpt, f.epoch, f.last_line) for f in found.findings]

    data = b"\n".join(pieces)
    assert told(scan(data)) == told(scan(data, size=size))


EVIL = {
    "one letter": b"a",
    "words of failures": b"error failed nccl checkpoint timeout ",
    "the header of a traceback": b"Traceback (most recent call last): ",
    "progress that overwrites itself": b"step 1 loss 2.0 \r",
    "brackets": b"[rank1]: (",
    "escapes": b"\x1b[31",
    "numbers": b"1.1e1 status=1 ",
    "zeros": b"\0",
}


@pytest.mark.parametrize("what", EVIL)
def test_a_line_of_ten_megabytes_is_read_at_once(what: str) -> None:
    began = time.process_time()
    found = scan(EVIL[what] * (10 * MB // len(EVIL[what])))
    assert found.bytes_read > 9 * MB
    assert time.process_time() - began < 5.0


def test_neither_noise_nor_long_lines_of_the_rules_own_words_stall_it() -> None:
    rng = random.Random(1)
    words = b" ".join(_LINES).split()
    hard = b"\n".join(b" ".join(rng.choice(words) for _ in range(300)) for _ in range(300))
    began = time.process_time()
    scan(rng.randbytes(MB))
    scan(hard)
    assert time.process_time() - began < 30.0
