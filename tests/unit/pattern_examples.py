"""Lines that a regular expression matches: the shortest ones, where a choice is left to chance."""

from __future__ import annotations

import random
from typing import Any

from nvrx_slurm.attribution.logs.patterns import _constants as op
from nvrx_slurm.attribution.logs.patterns import _parser

_CATEGORIES = {
    op.CATEGORY_DIGIT: "7",
    op.CATEGORY_SPACE: " ",
    op.CATEGORY_WORD: "q",
    op.CATEGORY_NOT_SPACE: "q",
}
_CATEGORIES |= {op.CATEGORY_NOT_WORD: " ", op.CATEGORY_NOT_DIGIT: "q"}


def examples_of(pattern: str, count: int) -> list[str]:
    """Return lines that a pattern matches, the same ones at every call."""
    rng = random.Random(pattern)
    return [_draw(list(_parser.parse(pattern)), rng) for _ in range(count)]


def _draw(parsed: list[Any], rng: random.Random) -> str:
    return "".join(_one(operation, argument, rng) for operation, argument in parsed)


def _one(operation: Any, argument: Any, rng: random.Random) -> str:
    if operation is op.LITERAL:
        return chr(argument)
    if operation is op.ANY:
        return " "
    if operation is op.IN:
        return _member(rng.choice(argument), rng)
    if operation in (op.MAX_REPEAT, op.MIN_REPEAT):
        return _draw(list(argument[2]), rng) * argument[0]
    if operation is op.SUBPATTERN:
        return _draw(list(argument[3]), rng)
    if operation is op.BRANCH:
        return _draw(list(rng.choice(argument[1])), rng)
    return ""


def _member(member: Any, rng: random.Random) -> str:
    operation, argument = member
    if operation is op.LITERAL:
        return chr(argument)
    if operation is op.RANGE:
        return chr(rng.randint(*argument))
    return _CATEGORIES.get(argument, "q")
