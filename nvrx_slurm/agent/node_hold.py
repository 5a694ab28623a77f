"""One agent of a job per node: a new one waits until everything of its predecessor is gone.

A node is given up after a few seconds of silence, while its own agent, which may only be stopped, needs a few
more to notice. The new agent's ranks must not meet the old ones on the GPUs. What is held is a name in the
kernel, an abstract Unix socket (unix(7)): nothing can be left behind, and its end is heard, not polled for.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping

_RETRY_S = 0.05


class NodeInUseError(RuntimeError):
    """Another agent of the same job does not leave this node."""


def hold_name(environ: Mapping[str, str], node: str) -> str:
    """Return what all agents of one user's job on ``node`` agree on."""
    parts = (environ.get("SLURM_CLUSTER_NAME", ""), environ.get("SLURM_JOB_ID", ""), node)
    # A digest, for a name may have 107 bytes at most.
    digest = hashlib.sha256("/".join(parts).encode()).hexdigest()[:32]
    return f"\0nvrx-agent-{os.geteuid()}-{digest}"


def hold_node(name: str, patience_s: float) -> socket.socket:
    """Take ``name``; it is held until the socket is closed here and in every child that was forked.

    Raises:
        NodeInUseError: somebody of this user still has it after ``patience_s`` seconds.
        OSError: the kernel has no sockets for us.
    """
    deadline = time.monotonic() + patience_s
    while True:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(name)
            held.listen()
            return held
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        left = deadline - time.monotonic()
        if left <= 0:
            raise NodeInUseError("another agent of this job is still on this node")
        if not _await_end(name, left):
            # Somebody else's: the name is not worth a job.
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _is_free_or_ours(name: str) -> bool:
    """Tell whether nobody has ``name``, or a process of this user."""
    held = _holds(name)
    if any(not held.isdisjoint(_open_files(pid)) for pid in _processes_of_this_user()):
        return True
    # Ours may have ended meanwhile.
    return held.isdisjoint(_holds(name))


def _holds(name: str) -> set[str]:
    """Return the sockets of that name, as /proc shows them among open files (/proc/net/unix, proc_net(5))."""
    shown = name.replace("\0", "@")
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table]
    return {f"socket:[{row[6]}]" for row in rows if row[7:] == [shown]}


def _processes_of_this_user() -> Iterator[str]:
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                yield entry.name


def _open_files(pid: str) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path))
    return found


def _await_end(name: str, patience_s: float) -> bool:
    """Wait until the holder's last process has ended; return False if it is another user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiter:
        waiter.settimeout(patience_s)
        try:
            waiter.connect(name)
        except OSError:
            # Just gone, or about to listen, or too many wait already; or somebody who does not let us ask.
            time.sleep(_RETRY_S)
            return _is_free_or_ours(name)
        _, uid, _ = struct.unpack("3i", waiter.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            return False
        # It never accepts and never writes: this ends with it.
        with contextlib.suppress(OSError):
            waiter.recv(1)
        return True
