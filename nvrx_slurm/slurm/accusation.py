"""What a job says about its nodes in its own Comment: the user accuses, root verifies.

A user can't drain a node. So the Coordinator writes which nodes it holds to be the cause, and the epilog on
such a node, which root runs, looks closer. Whatever stands there is the user's word, and counts as no more.

A Comment belongs to others, too. Where it is a JSON object, ours is the key ``nvrx`` of it::

    {"APS":{"auto_resume_mode":"requeue"},"nvrx":{"v":1,"run":0,"bad":{"n17":"3 faults of its own"}}}

and in any other text ours is ``nvrx{"v":1,…}`` at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

KEY = "nvrx"
MOST_NODES = 16
_MOST_REASON = 80
_MOST_OURS = 1024
"""Characters of ours: the Comment goes through all of Slurm, and into its database."""
_MOST_READ = 64 * 1024
_NODE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_AT_END = re.compile(r"(?:^|\s)nvrx(\{[^\n]*\})\s*$")


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    v: Literal[1]
    run: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    bad: Annotated[
        dict[
            Annotated[str, msgspec.Meta(pattern=_NODE)],
            Annotated[str, msgspec.Meta(pattern=rf"^[ -~]{{1,{_MOST_REASON}}}$")],
        ],
        msgspec.Meta(max_length=MOST_NODES),
    ]


@dataclass(frozen=True)
class Accusation:
    """The nodes that one run of a job holds to be bad."""

    run: int = 0
    """SLURM_RESTART_COUNT: after a requeue the accusations of the run before are still there."""
    bad: Mapping[str, str] = field(default_factory=dict)
    """Why, by node."""

    def words(self) -> str:
        """Return it as JSON, as many nodes as fit; an earlier one goes before a later one."""
        bad = {
            node: (re.sub(r"[^ -~]", "?", why) or "?")[:_MOST_REASON]
            for node, why in self.bad.items()
            if re.match(_NODE, node)
        }
        while True:
            text = json.dumps({"v": 1, "run": self.run, "bad": bad}, separators=(",", ":"))
            if len(text) <= _MOST_OURS and len(bad) <= MOST_NODES:
                return text
            bad.popitem()


def parse_accusation(comment: str) -> Accusation:
    """Return what ``comment`` says; nothing at all unless every bit of it is as it should be."""
    if len(comment) > _MOST_READ:
        return Accusation()
    try:
        document = _json_object(comment)
        if document is not None:
            words = msgspec.convert(document.get(KEY), _Words)
        else:
            found = _AT_END.search(comment)
            words = msgspec.json.decode(found[1] if found else "null", type=_Words)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return Accusation()
    return Accusation(words.run, words.bad)


def with_accusation(comment: str, accusation: Accusation) -> str:
    """Return ``comment`` with ``accusation`` instead of an older one; what others keep there stays."""
    document = _json_object(comment)
    if document is not None or not comment.strip():
        ours = json.loads(accusation.words())
        return json.dumps({**(document or {}), KEY: ours}, separators=(",", ":"), ensure_ascii=False)
    others = _AT_END.sub("", comment).rstrip()
    return f"{others} {KEY}{accusation.words()}" if others else f"{KEY}{accusation.words()}"


def _json_object(text: str) -> dict[str, object] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
