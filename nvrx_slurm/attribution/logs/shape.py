"""Lines without what differs from run to run: equal shapes are one kind of message."""

from __future__ import annotations

import re

_PARTS = (
    (re.compile(r"\b0x[0-9a-fA-F_]{2,32}|\b[0-9a-fA-F]{12,64}\b"), "#x"),
    (re.compile(r"\[?\b\d{1,3}(?:\.\d{1,3}){3}\]?(?:[:<]\d{1,5}>?)?"), "#ip"),
    (re.compile(r"\b[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{2,4}){2,7}(?:\.[0-9a-f])?\b"), "#pci"),
    (re.compile(r"/(?:[\w.@=+-]{1,120}/){1,24}"), "/…/"),
    (re.compile(r"\b(node|host|nid)[-_]?\w{0,4}[-_]?\d{1,6}\b"), r"\1#"),
    (re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"), "#"),
)
_MAX = 300


def shape(text: str) -> str:
    """Return the message with numbers, addresses, directories and node names blotted out."""
    text = text[: 2 * _MAX]
    for pattern, by in _PARTS:
        text = pattern.sub(by, text)
    return " ".join(text.split())[:_MAX]
