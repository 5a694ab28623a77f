"""How a rank ends whose program has failed: told at once, with its last words, and without an interpreter's
slow way out. One that has torch and a process group in it takes most of a second to take itself apart, and
every other rank would wait for that.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.flight_recorder import short_address

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MAX_MESSAGE = 4096
_MAX_TRACEBACK = 64 * 1024
_exit = os._exit
"""As it was before the user's program ran, which may have put something else in its place."""


def exit_code_of(leaving: SystemExit) -> int:
    """Return what the process would exit with, as ``sys.exit`` defines it."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def tell_agent(code: int) -> None:
    """Say that the main thread is over: threads or exit handlers can keep the process for ever."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        failed = rank_channel.ProgramFailed(
            rank=int(os.environ["RANK"]), cycle=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), exit=code
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            with short_address(Path(os.environ[rank_channel.SOCKET_VARIABLE])) as address:
                channel.connect(address)
            channel.send(rank_channel.encode_request(failed), socket.MSG_NOSIGNAL)


def write_error_file(error: BaseException) -> None:
    """Leave the exception where torch's ``record`` would, unless that has been there before.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    with contextlib.suppress(Exception):
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        message = {
            "message": text[:_MAX_MESSAGE],
            "extraInfo": {
                "py_callstack": _shortened(
                    "".join(traceback.format_exception(type(error), error, error.__traceback__))
                ),
                "timestamp": str(int(time.time())),
            },
        }
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


def _shortened(text: str) -> str:
    half = _MAX_TRACEBACK // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n…\n{text[-half:]}"


def leave(code: int) -> NoReturn:
    """Join the threads that are no daemons, run the exit handlers, flush what is open, and exit.

    As the interpreter does (Py_FinalizeEx), but for the destructors of what is left.
    """
    # Also what a signal's handler raises meanwhile, sys.exit(0) for instance: the program has failed.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        _flush_all()
    _exit(code)


def exit_now(code: int) -> NoReturn:
    """Exit without anything but the last words."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _exit(code)


def _flush_all() -> None:
    """Write what files of the program still hold; their destructors would."""
    writers = [
        thing
        for thing in gc.get_objects()
        # The type's own bases: objects that stand for others may run anything when asked what they are.
        if issubclass(type(thing), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom)
    ]
    for writer in sorted(writers, key=lambda writer: not isinstance(writer, io.TextIOWrapper)):
        with contextlib.suppress(Exception):
            writer.flush()
