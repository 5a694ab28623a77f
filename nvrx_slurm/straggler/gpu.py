"""What a GPU does in sections: kernel by kernel where CUPTI is at hand, else by CUDA events."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import torch

from nvrx_slurm.straggler import cupti
from nvrx_slurm.straggler.kernels import KernelTimes, NoKernelTimesError, open_activity
from nvrx_slurm.straggler.sections import MAX_SAMPLES, GpuTimes
from nvrx_slurm.straggler.statistic import Statistic, summarize
from nvrx_slurm.straggler.torch_profiler import torch_profiler

_log = logging.getLogger(__name__)


class EventTimes:
    """Times sections by pairs of CUDA events; ``section:NAME`` then stands for a kernel.

    An event costs a few microseconds of the host and none of the GPU's time. Pairs are reused. The GPU is
    never waited for.
    """

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._pairs: deque[tuple[str, Any, Any]] = deque(maxlen=MAX_SAMPLES)

    def begin(self, section: str) -> object:
        event = self._event()
        event.record()
        return event

    def end(self, section: str, begun: object) -> None:
        if not section:
            self._free.append(begun)
            return
        event = self._event()
        event.record()
        self._pairs.append((f"section:{section}", begun, event))

    def summaries(self) -> dict[str, dict[Statistic, float]]:
        samples: dict[str, list[float]] = {}
        # What the GPU has not done yet is in the next report.
        while self._pairs and self._pairs[0][2].query():
            name, begun, ended = self._pairs.popleft()
            samples.setdefault(name, []).append(begun.elapsed_time(ended) * 1e3)
            self._free += (begun, ended)
        return {name: summary for name, times in samples.items() if (summary := summarize(times))}

    def _event(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)


def find_gpu_times() -> GpuTimes | None:
    """Return what measures this rank's GPU, None without one; a downgrade is said once, in the log."""
    if not torch.cuda.is_available():
        _log.info("no CUDA device: sections are timed on the CPU only")
        return None
    events = EventTimes()
    try:
        return KernelTimes(open_activity(cupti.libraries()), events, torch_profiler())
    except NoKernelTimesError as error:
        _log.warning("kernels are not timed one by one, and sections by CUDA events: %s", error)
        return events
