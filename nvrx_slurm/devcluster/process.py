"""Processes by their own id, guarded against another process having got the same id since."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from nvrx_slurm.devcluster.errors import DevClusterError


@dataclasses.dataclass(frozen=True)
class ProcessRecord:
    """One process for all time: its id and when it started, in clock ticks since boot."""

    pid: int
    start: int

    @classmethod
    def read(cls, path: Path) -> ProcessRecord | None:
        try:
            pid, start = path.read_text().split()
            return cls(int(pid), int(start))
        except (OSError, ValueError):
            return None

    @classmethod
    def of(cls, pid: int) -> ProcessRecord | None:
        start = start_of(pid)
        return None if start is None else cls(pid, start)

    def is_alive(self) -> bool:
        return start_of(self.pid) == self.start


def start_of(pid: int) -> int | None:
    """When the process started; None when there is none, or only what its parent has not yet collected."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def sharing_networks(of: Iterable[ProcessRecord]) -> tuple[ProcessRecord, ...]:
    """Every process in the network namespaces of these living ones, themselves included."""
    wanted = {network for record in of if (network := _network_of(record.pid)) is not None}
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    records = (ProcessRecord.of(pid) for pid in pids if _network_of(pid) in wanted)
    return tuple(record for record in records if record is not None)


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def kill(records: Iterable[ProcessRecord], patience_s: float = 10.0) -> None:
    """SIGKILL to each, and wait until they are gone.

    Raises:
        DevClusterError: one is still there after ``patience_s``.
    """
    with contextlib.ExitStack() as stack:
        handles: dict[int, ProcessRecord] = {}
        for record in records:
            try:
                handle = os.pidfd_open(record.pid)
            except ProcessLookupError:
                continue
            stack.callback(os.close, handle)
            # The handle is for whoever has the id now; only then does the start time tell that it is ours.
            if record.is_alive():
                handles[handle] = record
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        deadline = time.monotonic() + patience_s
        poll = select.poll()
        for handle in handles:
            poll.register(handle, select.POLLIN)
        while handles:
            ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            for handle, _ in ended:
                poll.unregister(handle)
                del handles[handle]
            if not ended:
                pids = ", ".join(str(record.pid) for record in handles.values())
                raise DevClusterError(
                    f"process {pids} does not end {patience_s:g} s after SIGKILL: it is stuck in the kernel; "
                    f"try again when the storage or device that it waits for answers"
                )
