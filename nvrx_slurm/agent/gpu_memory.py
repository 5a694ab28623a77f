"""Wait until the memory of this job's GPUs is free again, before the next cycle needs it.

The driver releases what a killed process held after the process itself is gone; a rank that starts meanwhile
fails with "out of memory". Blocking: the agent calls it in a thread, and only where there are GPUs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from nvrx_slurm.agent.gpus import Gpu, GpuError
from nvrx_slurm.wire.messages import GpuMemoryLeft

POLL_S = 0.1


class GpuMemory:
    """Knows the GPUs, and who was on them before this job."""

    def __init__(
        self, gpus: Sequence[Gpu], tolerance_mb: float, is_alive: Callable[[int], bool] | None = None
    ) -> None:
        self._gpus = gpus
        self._tolerance_mb = tolerance_mb
        self._is_alive = is_alive or _exists
        self._strangers = {pid for gpu in gpus for pid in _processes(gpu) or ()}
        """Processes of others that this node need not show: an agent in a container sees neither."""

    def wait(self, ours: Collection[int], timeout_s: float, given_up: threading.Event) -> list[GpuMemoryLeft]:
        """Wait until no GPU holds memory of this job any more; return those that still do at the end.

        A GPU is free when no more than the tolerance is used, or when nobody but others is on it. Where the
        memory is free already, one query is all that it takes.

        Args:
            ours: the processes of the cycle that has ended.
            given_up: ends the wait at once.
        """
        began = time.monotonic()
        waiting = list(self._gpus)
        while waiting := [gpu for gpu in waiting if not self._is_free(gpu, ours)]:
            left = began + timeout_s - time.monotonic()
            if left <= 0 or given_up.wait(min(POLL_S, left)):
                break
        seconds = time.monotonic() - began
        return [self._left(gpu, ours, seconds) for gpu in waiting]

    def _is_free(self, gpu: Gpu, ours: Collection[int]) -> bool:
        try:
            used = gpu.used_mb()
        except GpuError:
            return True
        if used <= self._tolerance_mb:
            return True
        processes = _processes(gpu)
        return processes is not None and not self._of_this_job(processes, ours)

    def _of_this_job(self, processes: Mapping[int, float], ours: Collection[int]) -> list[int]:
        """Return those that were ours, and those that are dying: nobody else's are likely to be."""
        return [
            pid for pid in processes if pid in ours or not (pid in self._strangers or self._is_alive(pid))
        ]

    def _left(self, gpu: Gpu, ours: Collection[int], seconds: float) -> GpuMemoryLeft:
        used = 0.0
        with contextlib.suppress(GpuError):
            used = gpu.used_mb()
        processes = _processes(gpu) or {}
        left = self._of_this_job(processes, ours)
        # Waiting for the same once more would help no more.
        self._strangers.update(pid for pid in left if pid not in ours)
        return GpuMemoryLeft(
            gpu=gpu.name,
            used_mb=used,
            waited_s=seconds,
            processes=[f"{pid} ({processes[pid]:.0f} MiB, {_describe(pid)})" for pid in left],
        )


def _processes(gpu: Gpu) -> Mapping[int, float] | None:
    try:
        return gpu.processes()
    except GpuError:
        return None


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return f"{file.read().strip()} of uid {os.stat(f'/proc/{pid}').st_uid}"
    except OSError:
        return "gone"
