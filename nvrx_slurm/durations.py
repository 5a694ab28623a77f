"""Durations as people write them: ``90``, ``90s``, ``5m``, ``1.5h``."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
NO_LIMIT = ("none", "null", "off", "")
"""What stands for no limit, where that is possible."""


def parse_duration(text: str) -> float:
    """Return seconds.

    Raises:
        ValueError: not a duration, or not above 0; the message says what is accepted.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match.group(2) not in _UNITS or not math.isfinite(float(match.group(1))):
        raise ValueError(f"{text!r} is not a duration; accepted: 90s, 5m, 1.5h")
    seconds = float(match.group(1)) * _UNITS[match.group(2)]
    if seconds <= 0:
        raise ValueError(f"{text!r}: a duration above 0 is needed")
    return seconds


def parse_limit(text: str) -> float | None:
    """The same, and ``none`` is None.

    Raises:
        ValueError: neither.
    """
    if text.strip().lower() in NO_LIMIT:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{error}, none" if "accepted" in str(error) else f"{error}, or none") from None
