"""Leaving nothing behind, however a benchmark ends: by itself, by Ctrl-C, or by ``kill``."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import psutil

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S = 60.0  # a Coordinator gives its agents half of it


class _Asked:
    """Whether somebody wants the benchmark to end, and whether that must wait a moment."""

    to_end = False
    starting = False


def as_ctrl_c() -> None:
    """Make SIGTERM and SIGHUP unwind the program as Ctrl-C does; only once, so that nothing disturbs that."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ask)


def _ask(number: int, frame: FrameType | None) -> None:
    if _Asked.to_end:
        return
    _Asked.to_end = True
    if not _Asked.starting:
        raise KeyboardInterrupt


@contextlib.contextmanager
def program(argv: Sequence[Any], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``argv`` for as long as the context lasts; ``how`` as for Popen."""
    process = None
    try:
        _Asked.starting = True
        process = subprocess.Popen(argv, **how)
        _Asked.starting = False
        if _Asked.to_end:
            raise KeyboardInterrupt
        yield process
    finally:
        _Asked.starting = False
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the program to end, and kill what is left of it and its children after a while."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()  # psutil compares start times: a process that has the id by now is left alone
    process.kill()
    process.wait()
    psutil.wait_procs(family, timeout=5.0)
