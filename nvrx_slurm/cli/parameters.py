"""Click parameter types that several commands share."""

from __future__ import annotations

from typing import Any

import click

from nvrx_slurm.durations import parse_duration, parse_limit
from nvrx_slurm.wire.node_options import MOST_COUNT


class Count(click.IntRange):
    """An integer of at least ``min``, and no larger than messages and the journal carry."""

    name = "integer"

    def __init__(self, min: int) -> None:
        super().__init__(min=min)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(super().convert(value, param, ctx))
        if number > MOST_COUNT:
            self.fail(f"{number} is more than {MOST_COUNT}", param, ctx)
        return number


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Seconds, written ``90``, ``90s``, ``5m`` or ``1.5h``; with ``or_none``, ``none`` means no limit.

    With ``or_zero``, ``0`` is accepted, too.
    """

    name = "duration"

    def __init__(self, *, or_none: bool = False, or_zero: bool = False) -> None:
        self._or_none = or_none
        self._or_zero = or_zero

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        if isinstance(value, int | float):
            return float(value)
        if self._or_zero and str(value).strip() == "0":
            return 0.0
        try:
            return parse_limit(str(value)) if self._or_none else parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
