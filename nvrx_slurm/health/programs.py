"""Other programs: started from an argument list, in an own process group, with a time-out and a plain
locale."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nvrx_slurm.health.unavailable import UnavailableError

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOST_OUTPUT = 64 * 1024


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
            output, errors = process.communicate(timeout=timeout_s)
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


def _text(data: bytes) -> str:
    return data[:_MOST_OUTPUT].decode(errors="replace").strip()
