"""Linux process facilities that Python has no call for: prctl(2), and killing a whole tree."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
from collections.abc import Callable, Iterator

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1  # linux/ioprio.h
_IOPRIO_CLASS_SHIFT = 13
_IOPRIO_MIDDLE = 4
_SYS_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_MPOL_BIND = 2
_TCP_LISTEN = "0A"


def _prctl(option: int, argument: int | bytes) -> None:
    value = argument if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def become_subreaper() -> None:
    """Adopt every orphan below this process, so that none escapes (PR_SET_CHILD_SUBREAPER, prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(sig: signal.Signals, parent: int) -> None:
    """Have the kernel send ``sig`` to this process when its parent dies (PR_SET_PDEATHSIG, prctl(2)).

    ``parent`` is who the parent was meant to be: if it is gone already, this process gets ``sig`` at once.
    """
    _prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def set_process_name(name: str) -> None:
    """Name this process for ps(1) and top(1); the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def bind_memory(node: int, *, strict: bool) -> None:
    """Take this process's memory, and its children's, from a NUMA node: only, or first of all.

    Raises:
        OSError: this machine, or what confines this process, does not allow it (set_mempolicy(2)).
    """
    number = _SYS_SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"not known how on {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << (node % bits)
    policy = _MPOL_BIND if strict else _MPOL_PREFERRED
    # The kernel takes one bit less than it is told (get_nodes, mm/mempolicy.c).
    if _libc.syscall(number, policy, mask, ctypes.c_ulong(bits * len(mask) + 1)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"set_mempolicy: {os.strerror(error)}")


def set_io_priority(io_class: int) -> None:
    """Put this process into an I/O scheduling class: 1 real time, 2 best effort, 3 idle (ioprio_set(2)).

    Raises:
        OSError: not allowed, or not known how on this machine.
    """
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"not known how on {platform.machine()}")
    level = 0 if io_class == 3 else _IOPRIO_MIDDLE
    if _libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, io_class << _IOPRIO_CLASS_SHIFT | level) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ioprio_set: {os.strerror(error)}")


def process_state(pid: int) -> str:
    """Return the state letter of ``/proc/<pid>/stat`` (proc(5)), empty when there is no such process."""
    return _state_in(f"/proc/{pid}/stat")


def thread_state(pid: int, thread: int) -> str:
    """Return the state letter of one thread, empty when there is no such thread."""
    return _state_in(f"/proc/{pid}/task/{thread}/stat")


def _state_in(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            # The command name stands in parentheses and may itself hold any character.
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def children_of(pid: int) -> list[int]:
    """Return the direct children of all threads of ``pid``."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def descendants_of(pid: int, without: Callable[[int], bool] | None = None) -> Iterator[int]:
    """Yield every process below ``pid``, parents before children.

    Args:
        without: tells which processes are left out, with all that is below them.
    """
    pending = children_of(pid)
    while pending:
        child = pending.pop()
        if without is not None and without(child):
            continue
        yield child
        pending += children_of(child)


def kill_descendants() -> None:
    """SIGKILL everything below this process and wait until nothing is left.

    Only a subreaper can rely on it: there orphans come back as children, so the tree can shrink to nothing
    but not escape. Blocks as long as a process stays in uninterruptible sleep.
    """
    while True:
        for pid in descendants_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def listening_user(port: int) -> int | None:
    """Return whose process listens on TCP ``port`` of this host (/proc/net/tcp, proc(5)); None: nobody's."""
    for name in ("tcp6", "tcp"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as table:
            for line in table:
                fields = line.split()
                if fields[3] == _TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    return int(fields[7])
    return None
