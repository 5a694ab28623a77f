"""Click parameter types that several commands share."""

from __future__ import annotations

import math
import re

import click

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


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
        text = str(value).strip().lower()
        if self._or_none and text in ("none", "null", "off", ""):
            return None
        match = _DURATION.fullmatch(text)
        if match is None or match.group(2) not in _UNITS or not math.isfinite(float(match.group(1))):
            accepted = "90s, 5m, 1.5h" + (", none" if self._or_none else "")
            self.fail(f"{value!r} is not a duration; accepted: {accepted}", param, ctx)
        seconds = float(match.group(1)) * _UNITS[match.group(2)]
        if seconds <= 0:
            self.fail(f"{value!r}: a duration above 0 is needed", param, ctx)
        return seconds
