"""How an agent gets the Python stacks of a rank that hangs: by a signal, into a file beside its page."""

from __future__ import annotations

import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGRTMIN + 20
"""faulthandler answers it, whatever the rank is doing; neither Python, torch, NCCL nor MPI use it."""


def stacks_path(page: Path) -> Path:
    """Return the file beside a rank's heartbeat page."""
    return page.with_suffix(".stacks")
