"""The rank's side of :mod:`nvrx_slurm.wire.stacks`: have faulthandler write all stacks when asked."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from pathlib import Path

from nvrx_slurm.wire.stacks import STACKS_SIGNAL, stacks_path

_log = logging.getLogger("nvrx_slurm.fault_tolerance")


class StacksOnRequest:
    """While this is open, ``STACKS_SIGNAL`` writes the stacks of all threads.

    The handler is C code that needs neither the GIL nor a Python instruction to run, so it answers from a
    process that hangs anywhere but in an uninterruptible system call.
    """

    def __init__(self, page: Path) -> None:
        self._fd: int | None = None
        if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
            _log.info("signal %d is taken: the stacks of a hang are not recorded by it", STACKS_SIGNAL)
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(stacks_path(page), flags, 0o600)
            faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError) as error:
            _log.info("the stacks of a hang will not be recorded: %s", error)
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            os.close(self._fd)
            self._fd = None
