"""A flood of one message does not hide what differs from it in a number alone."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml
from healthy_logs import healthy

from nvrx_slurm.attribution.logs import scan as scan_module
from nvrx_slurm.attribution.logs.finding import MAX_RANKS, Finding, Source
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner, Scan

FLUSHED = "[rank{r}]: NCCL WARN NET/IB : Got completion from peer 10.0.{r}.4<{n}> with status={s} opcode=0"
MANY = 3000
_DATA = yaml.safe_load((Path(__file__).parent / "data/attribution_heldout.yaml").read_text())
HELD_OUT = [line for text in _DATA["lines"].values() for line in text.splitlines()]


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


@pytest.mark.parametrize("place", [0, 1, 300, 2000, MANY])
def test_one_xid_among_many_others_is_found(place: int) -> None:
    xid = "NVRM: Xid (PCI:0000:{b:02x}:00): {x}, pid={n}, name=python, Ch 0000000f"
    lines = [xid.format(b=16 * (n % 8), x=45, n=n) for n in range(MANY)]
    lines.insert(place, xid.format(b=16, x=79, n=7))
    assert found(scan(lines)) == {"gpu.xid_cleanup": MANY, "gpu.off_bus": 1}


def test_what_comes_again_after_training_went_on_is_seen_at_once() -> None:
    lines = [*flood(12), "step: 10 loss: 2.0", "step: 20 loss: 1.9", *flood(12, 3)]
    result = scan(lines)
    (finding,) = result.findings
    assert (finding.epoch, finding.line, finding.count) == (2, MANY + 3, MANY + 3)


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line {line}, in step',
    "    loss.backward()",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 647, in backward',
    "RuntimeError: peer {r} is gone",
]


def tracebacks(ranks: int, prefix: str) -> list[list[str]]:
    return [[(prefix + text).format(r=rank, line=rank % 7) for text in TRACEBACK] for rank in range(ranks)]


@pytest.mark.parametrize("prefix", ["", "[rank{r}]: ", "2026-01-02T03:04:05.678 n1 rank {r}: "])
def test_many_tracebacks_are_counted_and_one_from_elsewhere_is_another(prefix: str) -> None:
    those = tracebacks(600, prefix)
    those[400][1] = those[400][1].replace("train.py", "data.py")
    those[500][4] = those[500][4].replace("RuntimeError", "KeyError")
    result = scan([line for one in those for line in one])
    assert sorted((f.exception, f.frame, f.count) for f in result.findings) == [
        ("KeyError", "train.py:step", 1),
        ("RuntimeError", "data.py:step", 1),
        ("RuntimeError", "train.py:step", 598),
    ]


def test_so_they_are_where_their_lines_are_mixed() -> None:
    those = tracebacks(600, "[rank{r}]: ")
    those[400][1] = those[400][1].replace("train.py", "data.py")
    result = scan([line for lines in zip(*those, strict=True) for line in lines])
    assert sorted((f.frame, f.count, f.ranks == {400}) for f in result.findings) == [
        ("data.py:step", 1, True),
        ("train.py:step", 599, False),
    ]


def test_every_line_is_counted_and_the_last_is_known() -> None:
    result = scan(flood(12))
    (finding,) = result.findings
    assert (finding.count, finding.last_line) == (MANY, MANY)
    assert len(finding.ranks) == MAX_RANKS


def mixed(seed: int) -> list[str]:
    """Lines of 64 ranks, four at a time: tracebacks, failures of a dozen kinds, and a healthy job's."""
    rng = random.Random(seed)
    kinds = rng.sample(HELD_OUT, 12)
    prefix = rng.choice(["[rank{r}]: ", "2026-01-02T03:04:05.678 n1 rank {r}: ", "{r}: "])
    harmless = healthy(300)
    waiting = []
    for _ in range(1000):
        front, chance = prefix.format(r=rng.randrange(64)), rng.random()
        if chance < 0.3:
            names = {"r": rng.randrange(99), "line": rng.randrange(900)}
            one = [front + text.format(**names) for text in TRACEBACK]
            one[1] = one[1].replace("step", rng.choice(["step", "step2"]))
        elif chance < 0.7:
            one = [front + re.sub(r"(?<![\w.])\d{3,}", lambda _: str(rng.randrange(1000)), rng.choice(kinds))]
        else:
            one = [front + rng.choice(harmless)]
        waiting.append(one)
    lines, open_now = [], waiting[:4]
    rest = iter(waiting[4:])
    while open_now:
        one = rng.choice(open_now)
        lines.append(one.pop(0))
        if not one:
            open_now.remove(one)
            open_now += [other for other in [next(rest, None)] if other]
    return lines


@pytest.mark.parametrize("seed", range(4))
def test_what_is_counted_unseen_is_what_a_look_at_every_line_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_of(result: Scan) -> dict[tuple[str, str, str], tuple[object, ...]]:
        # Of the same kind, numbers of another length may make another message.
        kinds: dict[tuple[str, str, str], list[Finding]] = {}
        for one in result.findings:
            kinds.setdefault((one.family.id, one.exception, one.frame), []).append(one)
        return {
            kind: (
                sum(one.count for one in ones),
                max((one.epoch, one.line) for one in ones),
                set().union(*(one.ranks for one in ones)),
            )
            for kind, ones in kinds.items()
        }

    lines = mixed(seed)
    fast = all_of(scan(lines))
    monkeypatch.setattr(scan_module, "_FEW", 10**9)
    monkeypatch.setattr(scan_module, "_FLOOD", 10**9)
    monkeypatch.setattr(LogScanner, "_remember", lambda *_: False)
    assert fast == all_of(scan(lines))
