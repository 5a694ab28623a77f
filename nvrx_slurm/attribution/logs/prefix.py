"""What stands in front of a line: time, node, rank, level; and who claims to have said it."""

from __future__ import annotations

import datetime
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]|\x1b\][^\x07\x1b]{0,256}\x07?")
_MERGED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}) (\S{1,255}) rank (\d{1,7}): ?")
_ISO = re.compile(
    r"\W{0,3}(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(?:Z"
    r"|[+-]\d\d:?\d\d)?[^\w\[]{0,3}"
)
_GLOG = re.compile(
    r"\[?([IWEFCD])(\d\d)?(\d{1,2}) (\d\d):(\d\d):(\d\d)\.(\d{1,9})(?: +\d+)? "
    r"+(?=[\w/.-]{1,200}\.(?:cpp|cc|cu|py|h|hpp):\d+\])"
)
_DMESG = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\] ?")
_SYSLOG = re.compile(r"([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\S{1,64}) (?=\S{1,64}: )")
_UPTIME = re.compile(r"\[ {0,6}\d{1,9}\.\d{6}\] ?|kernel: ?(?:\[ {0,6}\d{1,9}\.\d{6}\] ?)?")
_RANK_PREFIXES = (
    re.compile(r"\[(?:default|trainer)?(?:rank|Rank|RANK)[ _]?:?(\d{1,7})\]:? ?"),
    re.compile(r"(?:rank|Rank|RANK)[ _]?(\d{1,7}) ?: ?"),
    re.compile(r"(?:\[default(\d{1,7})\]:)"),
    re.compile(r"(\d{1,6}): (?=\S)"),
    re.compile(r"\(\w{1,60} pid=\d{1,9}(?:, ip=[\w.:]{1,64})?\)(?: \[repeated \d+x[^\]]{0,80}\])? ?()"),
)
_RANK_INSIDE = re.compile(
    r"\[[^\]]{0,80}\bRank (\d{1,7})\]|^\W{0,4}(?:\w+Error: )?Rank ?(\d{1,7})[:,]|\brank ?: "
    r"?(\d{1,7}) \(local_rank"
)
_LEVEL = re.compile(
    r"\b(DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)\b(?=[\]\s:|,)-])|\[(DEBUG|INFO|WARN|WARNING|ERROR)[|\]]"
)
_LETTER = re.compile(r"([IWEF]) [\w/.-]{1,200}\.(?:cpp|cc|cu|py|h|hpp):\d+\]")
_AT_ONCE = re.compile(
    rb"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} \S{1,255} rank (\d{1,7}):|\[rank(\d{1,7})\]:)"
)
_LEVEL_WITHIN = 120
_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], start=1
    )
}
_KERNEL = re.compile(
    r"\bNVRM\b|\bXid\b|\bSXid\b|\bkernel:|\bmce: |\[Hardware Error\]|^\[ {0,6}\d{1,9}\.\d{6}\]", re.I
)
_SLURM = re.compile(
    r"\b(?:slurmstepd|srun|salloc|sbatch|slurmd|slurmctld)(?:-\S{1,64})?: "
    r"|\b(?:JobState|Reason)=|\bscontrol\b"
)


class LineLevel(enum.Enum):
    """How bad the line's own logger holds it to be."""

    INFO = "info"
    """Debug, information or a warning."""
    ERROR = "error"
    """An error, or no logger wrote it."""


class Claim(str, enum.Enum):
    """Who a line claims to be from. Any program can print any text: a claim is no proof."""

    PROCESS = "process"
    KERNEL = "kernel"
    SLURM = "slurm"


@dataclass(frozen=True)
class Prefix:
    """The front of a line."""

    text: str
    """The rest of the line."""
    ts: float | None = None
    """Unix seconds, in local time; where the line names no year, of the present one."""
    rank: int | None = None
    node: str | None = None
    level: LineLevel = LineLevel.ERROR


def parse_prefix(line: str) -> Prefix:
    """Take the known prefixes off a line, in whatever order they stand."""
    text = strip_ansi(line)
    ts, rank, node, error = None, None, None, None
    merged = _MERGED.match(text)
    if merged:
        ts = datetime.datetime.fromisoformat(merged.group(1)).timestamp()
        node, rank = merged.group(2), int(merged.group(3))
        text = text[merged.end() :]
    for _ in range(4):
        before = text
        text, found_ts, found_node, found_error = _take_time(text)
        ts = found_ts if ts is None else ts
        node = node or found_node
        error = found_error if found_error is not None else error
        text, found_rank = _take_rank(text)
        rank = found_rank if rank is None else rank
        if text == before:
            break
    if rank is None:
        inside = _RANK_INSIDE.search(text[:400])
        rank = int(next(group for group in inside.groups() if group)) if inside else None
    return Prefix(text, ts, rank, node, _level(text, error))


def rank_at_once(line: bytes) -> int | None:
    """Return the rank in front of a line, as nvrx-srun and torchrun write it; None: look closer."""
    found = _AT_ONCE.match(line)
    return None if found is None else int(found.group(1) or found.group(2))


def strip_ansi(text: str) -> str:
    """Return the text without colours; of a line that carriage returns overwrote, the last state."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    return text.rpartition("\r")[2] if "\r" in text else text


def claims(line: str) -> Claim:
    """Return who the line claims to be from."""
    if _KERNEL.search(line):
        return Claim.KERNEL
    return Claim.SLURM if _SLURM.search(line) else Claim.PROCESS


def _take_time(text: str) -> tuple[str, float | None, str | None, bool | None]:
    """Return the rest, the time, the node, and whether a level letter says error."""
    found = _ISO.match(text)
    if found:
        year, month, day, *clock, fraction = found.groups()
        return text[found.end() :], _unix((int(year), int(month), int(day)), clock, fraction), None, None
    found = _GLOG.match(text)
    if found:
        letter, month, day, *clock, fraction = found.groups()
        ts = _unix((0, int(month or 0), int(day)), clock, fraction)
        return text[found.end() :], ts, None, letter in "EFC"
    found = _DMESG.match(text)
    if found:
        name, day, *clock, year = found.groups()
        return (
            text[found.end() :],
            _unix((int(year), _MONTHS.get(name, 0), int(day)), clock),
            None,
            None,
        )
    found = _SYSLOG.match(text)
    if found:
        name, day, *clock, node = found.groups()
        return text[found.end() :], _unix((0, _MONTHS.get(name, 0), int(day)), clock), node, None
    found = _UPTIME.match(text)
    return (text[found.end() :] if found else text), None, None, None


def _unix(date: tuple[int, int, int], clock: Sequence[str], fraction: str | None = None) -> float | None:
    year = date[0] or datetime.date.today().year
    try:
        hour, minute, second = map(int, clock)
        moment = datetime.datetime(year, date[1], date[2], hour, minute, second)
    except ValueError:
        return None
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _take_rank(text: str) -> tuple[str, int | None]:
    for pattern in _RANK_PREFIXES:
        found = pattern.match(text)
        if found:
            return text[found.end() :], int(found.group(1)) if found.group(1) else None
    return text, None


def _level(text: str, by_letter: bool | None) -> LineLevel:
    if by_letter is not None:
        return LineLevel.ERROR if by_letter else LineLevel.INFO
    lettered = _LETTER.match(text)
    if lettered:
        return LineLevel.ERROR if lettered.group(1) in "EF" else LineLevel.INFO
    found = _LEVEL.search(text[:_LEVEL_WITHIN])
    if found is None:
        return LineLevel.ERROR
    word = found.group(1) or found.group(2)
    if word.startswith("WARN") and "NCCL WARN" in text[:_LEVEL_WITHIN]:
        return LineLevel.ERROR  # NCCL has no level for errors
    return LineLevel.INFO if word in ("DEBUG", "INFO", "NOTICE", "WARN", "WARNING") else LineLevel.ERROR
