"""Times of named sections. Entering and leaving one costs well below a microsecond."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

from nvrx_slurm.straggler.statistic import Statistic, summarize

MAX_SAMPLES = 8192
"""Kept per section and period; beyond them the oldest go."""
_IDLE_PERIODS = 8
"""After so many without a sample a section is forgotten: names may be ever new ones."""
_SKIPPED: AbstractContextManager[None] = nullcontext()


class GpuTimes(Protocol):
    """Where times of a GPU come from."""

    def begin(self, section: str) -> object:
        """A section begins; returns what :meth:`end` is to be given."""
        ...

    def end(self, section: str, begun: object) -> None:
        """It has ended, with an exception if ``section`` is empty."""
        ...

    def summaries(self) -> dict[str, dict[Statistic, float]]:
        """Return what was measured since the last call, in microseconds by name."""
        ...


class _Timed:
    """One passage; a section may be entered by several threads, and within itself."""

    __slots__ = ("_begun", "_samples")

    def __init__(self, samples: deque[float]) -> None:
        self._samples = samples
        self._begun = 0

    def __enter__(self) -> None:
        self._begun = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        begun, self._begun = self._begun, 0
        # 0: it was left twice, or never entered.
        if kind is None and begun:
            self._samples.append((time.perf_counter_ns() - begun) * 1e-6)


class _TimedWithGpu:
    __slots__ = ("_begun", "_cpu", "_gpu", "_name")

    def __init__(self, name: str, samples: deque[float], gpu: GpuTimes) -> None:
        self._name = name
        self._cpu = _Timed(samples)
        self._gpu = gpu
        self._begun: object = None

    def __enter__(self) -> None:
        self._begun = self._gpu.begin(self._name)
        self._cpu.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cpu.__exit__(kind)
        self._gpu.end("" if kind is not None else self._name, self._begun)


class _Section:
    __slots__ = ("entries", "idle_periods", "samples")

    def __init__(self) -> None:
        self.entries = 0
        self.idle_periods = 0
        self.samples: deque[float] = deque(maxlen=MAX_SAMPLES)


class Sections:
    """All sections of one rank.

    Args:
        profiling_interval: one in so many entries of a section is measured, the first among them.
        gpu: measures, too, what runs on the GPU meanwhile.
    """

    def __init__(self, profiling_interval: int = 1, gpu: GpuTimes | None = None) -> None:
        self._interval = profiling_interval
        self._gpu = gpu
        self._sections: dict[str, _Section] = {}

    def enter(self, name: str, *, profile_cuda: bool) -> AbstractContextManager[None]:
        """Return a context that measures its body, unless that is not due or ends with an exception.

        Raises:
            ValueError: the name is none.
        """
        section = self._sections.get(name)
        if section is None:
            if not isinstance(name, str) or not name:
                raise ValueError(f"the name of a section is {name!r}: a text that is not empty is accepted")
            section = self._sections.setdefault(name, _Section())
        entry = section.entries
        section.entries = entry + 1
        if self._interval > 1 and entry % self._interval:
            return _SKIPPED
        if profile_cuda and self._gpu is not None:
            return _TimedWithGpu(name, section.samples, self._gpu)
        return _Timed(section.samples)

    def summaries(self) -> dict[str, dict[Statistic, float]]:
        """Return the statistics of the period that ends here, in milliseconds, and begin the next one.

        A section without a sample is left out.
        """
        found = {}
        for name, section in list(self._sections.items()):
            # One by one: another thread may append meanwhile.
            samples = [section.samples.popleft() for _ in range(len(section.samples))]
            if summary := summarize(samples):
                found[name] = summary
                section.idle_periods = 0
                continue
            section.idle_periods += 1
            if section.idle_periods == _IDLE_PERIODS:
                self._sections.pop(name, None)
        return found

    def leave_gpu(self) -> None:
        """Measure the host alone from now on."""
        self._gpu = None
