"""How the doctor says durations, counts and what others have written."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nvrx_slurm.slurm import compress_hostlist

_SHOWN_NODES = 60


def clean(text: str) -> str:
    """Return ``text`` on one line and without control characters, which could drive a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def duration(seconds: float) -> str:
    """Say a duration as the command line takes it: ``4.5s``, ``90s``, ``10m``, ``1h 30m``, ``none``."""
    if math.isinf(seconds):
        return "none"
    if seconds < 120:
        return f"{seconds:g}s"
    whole = round(seconds)
    parts = [
        (whole // 86400, "d"),
        (whole % 86400 // 3600, "h"),
        (whole % 3600 // 60, "m"),
        (whole % 60, "s"),
    ]
    return " ".join(f"{value}{unit}" for value, unit in parts if value)


def count(number: int, what: str) -> str:
    """Return ``1 node``, ``3 nodes``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def node_list(nodes: Iterable[str]) -> str:
    """Return nodes as Slurm writes them, cut when there are very many."""
    said = clean(compress_hostlist(sorted(nodes))) or "none"
    return said if len(said) <= _SHOWN_NODES else f"{said[:_SHOWN_NODES]}…"
