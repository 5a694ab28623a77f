"""Click parameter types that several commands share."""

from __future__ import annotations

import click

from nvrx_slurm.durations import parse_duration, parse_limit


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Seconds, written ``90``, ``90s``, ``5m`` or ``1.5h``; with ``or_none``, ``none`` means no limit."""

    name = "duration"

    def __init__(self, *, or_none: bool = False) -> None:
        self._or_none = or_none

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        if isinstance(value, int | float):
            return float(value)
        try:
            return parse_limit(str(value)) if self._or_none else parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
