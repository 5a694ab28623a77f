"""What the dev cluster says when it cannot do what was asked."""

from __future__ import annotations


class DevClusterError(Exception):
    """One sentence: what is wrong, the evidence, and what to do about it."""
