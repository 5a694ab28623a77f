"""Whether the main thread still runs Python code, found out without running any in it.

The interpreter is asked to call ``sem_post`` in its main thread between two bytecodes (Py_AddPendingCall):
C code of a few nanoseconds, so that an asynchronous exception has nothing of ours to land in. While the call
has not been made, the progress page says since when it has been asked for.
"""

from __future__ import annotations

import ctypes
import time

from nvrx_slurm.supervisor.page import ProgressPage, Word

_libc = ctypes.CDLL(None)
# A call that has been asked for may be made at any later time: its semaphore lives as long as the process.
_semaphore = ctypes.create_string_buffer(64)
_libc.sem_init(_semaphore, 0, 0)
_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_address = ctypes.addressof(_semaphore)


class ProgressWatchdog:
    """Asks the main thread for signs of life, one after the other; for one thread."""

    _is_asked = False
    """One question is open at most, in the whole process."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        self._page.words[Word.BYTECODE_ASKED] = time.monotonic_ns() if ProgressWatchdog._is_asked else 0

    def tick(self) -> None:
        """Take the answer, if there is one, and ask again."""
        if ProgressWatchdog._is_asked and _libc.sem_trywait(_semaphore) != 0:
            return
        self._page.words[Word.BYTECODE_ASKED] = time.monotonic_ns()
        # The interpreter's queue may be full for a moment: then the next tick tries again.
        ProgressWatchdog._is_asked = _add_pending_call(_post, _address) == 0
