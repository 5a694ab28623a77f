"""What a hung rank was doing, found out before it is killed, within a bounded time.

Blocking; the agent calls it in a thread. Nothing here is needed for the restart: whatever can't be found out
is left out, and the reason noted.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm import linux
from nvrx_slurm.regular_file import open_regular
from nvrx_slurm.wire.stacks import STACKS_SIGNAL

MAX_STACKS_BYTES = 64 * 1024
_PY_SPY_SHARE = 0.6
"""Of the time that is left; the rest is for faulthandler."""
_POLL_S = 0.004
_SETTLED_POLLS = 4


@dataclass(frozen=True)
class Examination:
    """What was found out about one process."""

    process_state: str
    """Letter of ``/proc/<pid>/stat``; empty: the process is gone."""
    wchan: str
    """Kernel function that it sleeps in, if the kernel tells; of a stopped process that would say nothing."""
    kernel_stack: str
    """``/proc/<pid>/stack``, which only root may read."""
    source: str
    """Who wrote the stacks: ``py-spy``, ``faulthandler`` or empty."""
    stacks: str
    note: str
    """Why there are no stacks, or why they are not py-spy's."""


def find_py_spy(path: str | None) -> str | None:
    """Return py-spy if it is installed beside this interpreter or on ``path``."""
    beside = Path(sys.prefix) / "bin" / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy", path=path)


def examine(pid: int, stacks: Path, py_spy: str | None, timeout_s: float) -> Examination:
    """Examine the live process ``pid``, whose faulthandler writes to ``stacks``; takes ``timeout_s`` at most.

    A stopped process is continued to get its stacks: it is about to be killed.
    """
    end = time.monotonic() + timeout_s
    state = linux.process_state(pid)
    wchan = _read(Path(f"/proc/{pid}/wchan")).strip("\0\n ")
    kernel_stack = _read(Path(f"/proc/{pid}/stack"))
    source, text, notes = "", "", []
    if py_spy is not None:
        text, why = _ask_py_spy(py_spy, pid, state, _PY_SPY_SHARE * timeout_s)
        source = "py-spy" if text else ""
        notes += [why] if why else []
    if not text:
        text, why = _ask_faulthandler(pid, stacks, state, end)
        source = "faulthandler" if text else ""
        notes += [why] if why else []
    return Examination(
        process_state=state,
        wchan="" if wchan == "0" or state in ("T", "t") else wchan,
        kernel_stack=kernel_stack,
        source=source,
        stacks=text,
        note="; ".join(notes),
    )


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_STACKS_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _ask_py_spy(py_spy: str, pid: int, state: str, timeout_s: float) -> tuple[str, str]:
    argv = [py_spy, "dump", "--pid", str(pid)]
    if state in ("T", "t"):
        # It would wait for the process to stop for it, which has stopped for somebody else.
        argv.append("--nonblocking")
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, "LC_ALL": "C", "NO_COLOR": "1"},
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not answer within {timeout_s:.1f} s"
    except OSError as error:
        return "", f"py-spy cannot be run: {error.strerror}"
    if done.returncode != 0 or not done.stdout.strip():
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return "", f"py-spy failed: {said[-1][:200] if said else f'exit code {done.returncode}'}"
    return done.stdout[:MAX_STACKS_BYTES].decode(errors="replace"), ""


def _ask_faulthandler(pid: int, stacks: Path, state: str, end: float) -> tuple[str, str]:
    if not _catches(pid, STACKS_SIGNAL):
        return "", "the process has no handler that would write its stacks"
    before = _size(stacks)
    try:
        os.kill(pid, STACKS_SIGNAL)
        if state == "T":
            os.kill(pid, signal.SIGCONT)
    except OSError as error:
        return "", f"the process cannot be asked for its stacks: {error.strerror}"
    size, settled = before, 0
    while settled < _SETTLED_POLLS:
        if time.monotonic() >= end:
            if size == before:
                return "", "the process did not answer: it hangs in the kernel"
            break
        time.sleep(_POLL_S)
        now = _size(stacks)
        settled = settled + 1 if now == size and now > before else 0
        size = now
    try:
        with open(open_regular(stacks), "rb") as file:
            file.seek(before)
            return file.read(MAX_STACKS_BYTES).decode(errors="replace"), ""
    except OSError as error:
        return "", f"the stacks cannot be read: {error.strerror}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _catches(pid: int, sig: int) -> bool:
    """Tell whether the process has a handler: without one the signal would only kill it."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (sig - 1) & 1)
    return False
