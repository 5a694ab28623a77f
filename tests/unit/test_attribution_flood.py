"""A flood of one message does not hide what differs from it in a number alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.attribution.logs.finding import MAX_RANKS, Source
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner, Scan

FLUSHED = "[rank{r}]: NCCL WARN NET/IB : Got completion from peer 10.0.{r}.4<{n}> with status={s} opcode=0"
MANY = 3000


def scan(lines: list[str]) -> Scan:
    scanner = LogScanner(Source(Path("log")), load_rules())
    for line in lines:
        scanner.feed(line.encode() + b"\n")
    return scanner.finish()


def found(result: Scan) -> dict[str, int]:
    return {finding.family.id: finding.count for finding in result.findings}


def flood(status: int, count: int = MANY) -> list[str]:
    return [FLUSHED.format(r=n % 512, n=n, s=status) for n in range(count)]


@pytest.mark.parametrize("place", [0, 1, 300, 2000, MANY])
def test_one_line_with_another_number_that_decides_is_found_wherever_it_stands(place: int) -> None:
    lines = flood(5)
    lines.insert(place, FLUSHED.format(r=3, n=7, s=12))
    assert found(scan(lines)) == {"net.ib_flush": MANY, "net.ib_retry_exceeded": 1}


def test_so_it_is_where_the_numbers_stand_elsewhere_between_the_same_letters() -> None:
    lines = flood(5)
    lines[2000] = lines[2000].replace("status=5 opcode=0", "status=12 opcode=")
    assert found(scan(lines))["net.ib_retry_exceeded"] == 1


def test_every_line_is_counted_and_the_last_is_known() -> None:
    result = scan(flood(12))
    (finding,) = result.findings
    assert (finding.count, finding.last_line) == (MANY, MANY)
    assert len(finding.ranks) == MAX_RANKS
