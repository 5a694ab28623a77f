"""Was a rank that died of SIGKILL killed because memory ran out? Asked of the kernel, never guessed.

Two witnesses: the counter of such kills of the rank's memory cgroup (``memory.oom_control`` of cgroup v1,
``memory.events`` of v2; both count global shortages too), and the kernel log where this user may read it.
What can't be read is no evidence.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, linux/include/linux/proc_ns.h
_KILLED = re.compile(r"(?:Out of memory|out of memory|oom[-_]kill\w*)[^\n]*?Killed process (\d+)")
_MAX_RECORDS = 4096
_RECORD_BYTES = 16 * 1024


@dataclass
class _Counter:
    """Kills of one cgroup."""

    file: Path
    seen: int
    """Those that are no evidence for a later death."""
    latest: int


class OomWatch:
    """Watches one cycle's ranks on this node. ``root`` is the root of the file system, for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counters: dict[Path, _Counter] = {}
        self._counter_of: dict[int, _Counter] = {}
        self._killed: set[int] = set()
        self._log = self._open_log()

    def _open_log(self) -> int | None:
        """Return the kernel log, at its end; None if its process ids are not ours or it can't be read."""
        try:
            if os.readlink(self._root / "proc/self/ns/pid") != _INITIAL_PID_NAMESPACE:
                return None
            log = os.open(self._root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            os.lseek(log, 0, os.SEEK_END)
        except OSError:
            os.close(log)
            return None
        return log

    def started(self, pids: Iterable[int]) -> None:
        """Note the cgroups of ``pids`` while they live, and what had been counted before."""
        self._counter_of.clear()
        for pid in pids:
            file = self._counter_file(pid)
            count = None if file is None else _count(file)
            if file is None or count is None:
                continue
            counter = self._counters.setdefault(file, _Counter(file, count, count))
            counter.seen = counter.latest = count
            self._counter_of[pid] = counter

    def refresh(self) -> None:
        """Call now and then: a kill that was counted before the call before this explains no new death.

        It was of another process of the cgroup, a data-loader worker for instance.
        """
        self._read_log()
        for counter in self._counters.values():
            counter.seen = max(counter.seen, counter.latest)
            counter.latest = _count(counter.file) or counter.latest

    def evidence(self, pid: int) -> str:
        """Return what says that ``pid``, dead of SIGKILL, was killed for lack of memory; empty: nothing."""
        self._read_log()
        counter = self._counter_of.get(pid)
        count = None if counter is None else _count(counter.file)
        if counter is not None and count is not None and count > counter.seen:
            counter.seen += 1
            where = f"/{counter.file.parent.relative_to(self._root)}"
            return f"the kernel has counted an out-of-memory kill in its cgroup {where}"
        if pid in self._killed:
            return f"the kernel log says that process {pid} was killed because memory ran out"
        return ""

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _read_log(self) -> None:
        if self._log is None:
            return
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError:
                return
            if not record:
                return
            self._killed.update(int(pid) for pid in _KILLED.findall(record.decode(errors="replace")))

    def _counter_file(self, pid: int) -> Path | None:
        try:
            cgroups = (self._root / f"proc/{pid}/cgroup").read_text()
            mounts = (self._root / "proc/self/mountinfo").read_text()
        except OSError:
            return None
        unified = None
        for line in cgroups.splitlines():
            with contextlib.suppress(ValueError):
                number, controllers, path = line.split(":", 2)
                if "memory" in controllers.split(","):
                    return self._below_mount(mounts, "cgroup", "memory", path, "memory.oom_control")
                if number == "0" and not controllers:
                    unified = path
        if unified is None:
            return None
        return self._below_mount(mounts, "cgroup2", None, unified, "memory.events")

    def _below_mount(
        self, mounts: str, kind: str, controller: str | None, path: str, name: str
    ) -> Path | None:
        """Find file ``name`` of cgroup ``path``; fields of mountinfo as in proc(5)."""
        for line in mounts.splitlines():
            left, _, right = line.partition(" - ")
            fields, described = left.split(), right.split()
            if len(fields) < 5 or len(described) < 3 or described[0] != kind:
                continue
            if controller is not None and controller not in described[2].split(","):
                continue
            mounted, mount_point = fields[3].rstrip("/"), fields[4]
            if mounted and not (path + "/").startswith(mounted + "/"):
                continue
            file = self._root / mount_point.lstrip("/") / path[len(mounted) :].lstrip("/") / name
            if file.exists():
                return file
        return None


def _count(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
