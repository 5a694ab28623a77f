"""Other programs: started from an argument list, in an own process group, with a time-out and a plain
locale."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nvrx_slurm.health.unavailable import UnavailableError

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOST_OUTPUT = 64 * 1024
_CHUNK = 64 * 1024


@dataclass(frozen=True)
class Finished:
    """A program that has ended by itself."""

    code: int
    """Negative: minus the signal's number."""
    output: str
    errors: str = ""


class Programs(Protocol):
    """Runs programs."""

    def run(
        self, argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
    ) -> Finished:
        """Run to the end.

        Raises:
            UnavailableError: there is no such program, or it did not end in time.
        """
        ...


class RealPrograms:
    def run(
        self, argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
    ) -> Finished:
        """See :meth:`Programs.run`. A program that does not end is killed with its process group,
        unwaited."""
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={"PATH": _PATH, "LC_ALL": "C", **(environ or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot be started: {error.strerror}", argv[0]) from error
        try:
            output, errors = _collect(process, timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process in the kernel's D state does not die: nobody waits for it here.
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            why = f"did not end within {timeout_s:g} s"
            raise UnavailableError(why, " ".join(argv), expected=True) from None
        return Finished(process.returncode, _text(output), _text(errors))


def _collect(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bytes]:
    """Read both streams to their ends and wait; keep the beginning of each, however much comes.

    Raises:
        subprocess.TimeoutExpired
    """
    deadline = time.monotonic() + timeout_s
    assert process.stdout is not None
    assert process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fd)
                kept[key.fd] += chunk[: _MOST_OUTPUT - len(kept[key.fd])]
    process.wait(max(0.0, deadline - time.monotonic()))
    output, errors = kept.values()
    process.stdout.close()
    process.stderr.close()
    return bytes(output), bytes(errors)


def _text(data: bytes) -> str:
    return data.decode(errors="replace").strip()
