"""Slurm's compact host lists: ``n[001-003,7],rack[1-2]-n[1-4]`` (slurm.conf(5), "NodeName")."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
MAX_HOSTS = 1_000_000


class HostlistError(ValueError):
    """The text is not a host list; the message quotes it and says where it breaks."""


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of ``text`` in its order; an empty text has none.

    Raises:
        HostlistError: unbalanced brackets, a range that is not numeric or runs backwards, an empty item, more
            than a million hosts.
    """
    text = text.strip()
    if not text:
        return []
    hosts: list[str] = []
    for item in _split_top_level(text):
        hosts.extend(_expand_item(item, text, MAX_HOSTS - len(hosts)))
    return hosts


def _split_top_level(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
        if depth not in (0, 1):
            raise HostlistError(f"host list {text[:80]!r}: unbalanced bracket at position {position}")
    if depth:
        raise HostlistError(f"host list {text[:80]!r}: a bracket is not closed")
    return [*items, text[start:]]


def _expand_item(item: str, text: str, room: int) -> list[str]:
    parts: list[list[str]] = []
    position = 0
    while position < len(item):
        match = _PART.match(item, position)
        if match is None:
            raise HostlistError(f"host list {text[:80]!r}: cannot read {item[position : position + 20]!r}")
        position = match.end()
        ranges, literal = match.groups()
        parts.append([literal] if literal else _expand_ranges(ranges, text))
    if not parts:
        raise HostlistError(f"host list {text[:80]!r}: an empty item")
    if math.prod(map(len, parts)) > room:
        raise HostlistError(f"host list {text[:80]!r} names more than {MAX_HOSTS} hosts")
    return ["".join(combination) for combination in itertools.product(*parts)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise HostlistError(f"host list {text[:80]!r}: {piece!r} is not a number or a range")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise HostlistError(f"host list {text[:80]!r}: range {piece!r} runs backwards")
        if int(last) - int(first) >= MAX_HOSTS:
            raise HostlistError(f"host list {text[:80]!r}: range {piece!r} is larger than {MAX_HOSTS}")
        numbers.extend(f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return numbers


_NUMBERED = re.compile(r"(.*?)([0-9]+)")


def compress_hostlist(hosts: Iterable[str]) -> str:
    """Return a host list that expands to ``hosts``, same order, neighbours joined into ranges."""
    items: list[str] = []
    for (prefix, width), run in itertools.groupby(hosts, key=_prefix_and_width):
        if width == 0:
            items.extend(run)
            continue
        numbers = [host[len(prefix) :] for host in run]
        ranges = _ranges(numbers)
        single = len(numbers) == 1
        items.append(prefix + (ranges if single else f"[{ranges}]"))
    return ",".join(items)


def _prefix_and_width(host: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(host)
    return (match.group(1), len(match.group(2))) if match else (host, 0)


def _ranges(numbers: list[str]) -> str:
    pieces: list[str] = []
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and int(number) == int(last) + 1:
            last = number
            continue
        pieces.append(first if first == last else f"{first}-{last}")
        if number is not None:
            first = last = number
    return ",".join(pieces)
