"""Ranks that are slow: what is recorded of them, and what is done."""

from __future__ import annotations

import msgspec

from nvrx_slurm import journal
from nvrx_slurm.pace import StragglerVerdict


def straggler_event(verdict: StragglerVerdict, node: str, told_by: int | None) -> journal.StragglerReport:
    """Return the verdict as the journal has it; ``told_by``: the rank that says so, None: the Coordinator."""
    values = {name: getattr(verdict, name) for name in verdict.__struct_fields__}
    event = journal.StragglerReport(**values, told_by=told_by)
    return msgspec.structs.replace(
        event, node=node, score=round(verdict.score, 4), lost_ms=round(verdict.lost_ms, 3)
    )
