"""The reason that a drained node carries: ``nvrx:<check>:<scope>:<action> <epoch> <detail>``.

Other tools may parse it, and only what begins with ``nvrx:`` is ever cleared by us.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nvrx_slurm.health.result import Action, CheckResult

PREFIX = "nvrx:"
_MOST_CHARACTERS = 200
_MOST_SCOPE = 80
_UNFIT = re.compile(r"[^A-Za-z0-9_./-]+")
_REASON = re.compile(r"nvrx:([a-z0-9-]+):([A-Za-z0-9_./-]+):([a-z]+) ([0-9]{1,12})(?: (.*))?", re.S)


@dataclass(frozen=True)
class Reason:
    """A reason of ours, taken apart."""

    check: str
    scope: str
    """Without white space: ``gpu-3``."""
    action: Action
    since: int
    """Unix seconds."""
    detail: str

    def __str__(self) -> str:
        text = f"{PREFIX}{self.check}:{self.scope}:{self.action.value} {self.since} {self.detail}"
        return text[:_MOST_CHARACTERS].rstrip()


def reason_for(result: CheckResult, now: float) -> Reason:
    """Return the reason to drain a node for ``result``."""
    scope = _UNFIT.sub("-", result.scope).strip("-")[:_MOST_SCOPE] or "node"
    # Slurm ends a value at a quote or a new line, shows control characters as they are, and adds [who@when].
    plain = result.evidence.translate(str.maketrans("[]", "()"))
    detail = "".join(c if c.isprintable() and c not in "\"'`" else " " for c in plain)
    return Reason(result.check, scope, result.action, int(now), " ".join(detail.split()))


def parse_reason(text: str) -> Reason | None:
    """Return a reason of ours; None for anybody else's."""
    found = _REASON.fullmatch(text)
    if found is None or found[3] not in [action.value for action in Action]:
        return None
    return Reason(found[1], found[2], Action(found[3]), int(found[4]), found[5] or "")
