"""What a regular expression tells without being run: that it is linear, and what it needs in a line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

try:
    from re import _constants, _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as _constants
    import sre_parse as _parser

MAX_REPEAT = 400
MIN_LITERAL = 3
MAX_WAYS = 3_000_000
"""In which a pattern may divide a line among its repetitions and alternatives: matching may try them all."""
_UNBOUNDED = 4096
"""What a repetition without a bound can be: as many as characters of a line that patterns see."""
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_REFERENCES = (_constants.GROUPREF, _constants.GROUPREF_EXISTS)
_SINGLE = (_constants.LITERAL, _constants.IN, _constants.NOT_LITERAL)


def why_not_linear(pattern: str) -> str:
    """Return why matching could cost more than the length of the line times a constant; empty: it cannot.

    Raises:
        re.error: it is no regular expression.
    """
    parsed = _parser.parse(pattern)
    problem = _not_linear(parsed)
    if problem:
        return problem
    ways = _ways(parsed)
    if ways > MAX_WAYS:
        return (
            f"can divide a line in {ways:.0e} ways, {MAX_WAYS:,} are accepted: "
            "write \\d{1,9} and .{0,80} rather than \\d+ and .*"
        )
    return "matches every line" if parsed.getwidth()[0] == 0 and re.search(pattern, "") else ""


def _ways(parsed: Iterable[Any]) -> int:
    """Return in how many ways a sequence can match from one place, at most."""
    ways = 1
    for operation, argument in parsed:
        if operation in _REPEATS:
            least, most, inner = argument
            width = (_UNBOUNDED if most is _constants.MAXREPEAT else most) - least + 1
            ways *= 1 + _ways(inner) if (least, most) == (0, 1) else width
        elif operation is _constants.SUBPATTERN:
            ways *= _ways(argument[3])
        elif operation is _constants.BRANCH:
            each = [_ways(branch) for branch in argument[1]]
            ways *= max(each) if _excludes_each_other(argument[1]) else sum(each)
        elif operation in (_constants.ASSERT, _constants.ASSERT_NOT):
            ways *= max(1, _ways(argument[1]))
    return ways


def _excludes_each_other(branches: Iterable[Any]) -> bool:
    """Tell whether alternatives begin differently, so that at most one of them matches at a place."""
    begins = []
    for branch in branches:
        begin = ""
        for operation, argument in branch:
            if operation is not _constants.LITERAL:
                break
            begin += chr(argument)
        begins.append(begin)
    begins.sort()
    return all(not after.startswith(before) for before, after in itertools.pairwise(begins))


def needed_literals(pattern: str) -> frozenset[str] | None:
    """Return strings of which every matching line in lower case holds one; None: no such set is known."""
    return _needed(list(_parser.parse(pattern)))


def _needed(parsed: list[Any]) -> frozenset[str] | None:
    """Return the most telling set among those that the parts of a sequence need."""
    found: list[frozenset[str]] = []
    run = ""
    for operation, argument in [*parsed, (None, None)]:
        if operation is _constants.LITERAL:
            run += chr(argument)
            continue
        if len(run) >= MIN_LITERAL:
            found.append(frozenset([run]))
        run = ""
        inner: frozenset[str] | None = None
        if operation is _constants.SUBPATTERN:
            inner = _needed(list(argument[3]))
        elif operation is _constants.BRANCH:
            branches = [_needed(list(branch)) for branch in argument[1]]
            if all(branch is not None for branch in branches):
                inner = frozenset().union(*(branch for branch in branches if branch is not None))
        elif operation in _REPEATS and argument[0] >= 1:
            inner = _needed(list(argument[2]))
        if inner is not None:
            found.append(inner)
    return max(found, key=lambda literals: min(map(len, literals)) / len(literals) ** 0.5, default=None)


def _not_linear(parsed: Iterable[Any]) -> str:
    """Return why matching could cost more than a constant times the length; empty if it cannot."""
    for operation, argument in parsed:
        if operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            _, most, inner = argument
            single = len(inner) == 1 and inner[0][0] in _SINGLE
            if most is _constants.MAXREPEAT and not single:
                return f"repeats without a bound: write {{0,{MAX_REPEAT}}}"
            if most is not _constants.MAXREPEAT and most > MAX_REPEAT:
                return f"repeats more than {MAX_REPEAT} times"
            if not single and most > 1 and _ways(inner) > 1:
                return "repeats a repetition or alternatives that can match alike"
        elif operation in _REFERENCES:
            return "refers back to a group"
        for part in _parts(operation, argument):
            problem = _not_linear(part)
            if problem:
                return problem
    return ""


def _parts(operation: Any, argument: Any) -> list[Any]:
    if operation in _REPEATS:
        return [argument[2]]
    if operation is _constants.SUBPATTERN:
        return [argument[3]]
    if operation is _constants.BRANCH:
        return list(argument[1])
    if operation in (_constants.ASSERT, _constants.ASSERT_NOT):
        return [argument[1]]
    return []
