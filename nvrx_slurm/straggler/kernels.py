"""Times of single GPU kernels, which CUPTI reports to ``csrc/cupti`` (the module ``_cupti``).

A kernel belongs to the section in which it was launched, whatever thread launched it: the backward pass of
autograd runs on threads of its own. Kernels are known by their mangled name, without block and grid, whose
number has no bound with changing shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nvrx_slurm.straggler.sections import GpuTimes
from nvrx_slurm.straggler.statistic import Statistic, Summary
from nvrx_slurm.straggler.torch_profiler import TorchProfiler

if TYPE_CHECKING:
    from nvrx_slurm.straggler._cupti import Activity, Times
    from nvrx_slurm.straggler._cupti import KernelTimes as Kernel

_log = logging.getLogger(__name__)
_MOST_SECTIONS = 0xFFFF
_PATIENCE_MS = 1000
"""A report waits no longer for the thread that reads records; what is read later is in the next one."""


class NoKernelTimesError(RuntimeError):
    """Kernels can't be timed one by one here."""


def summary(times: Times) -> dict[Statistic, float]:
    """Return the statistics of a kernel, in microseconds."""
    return {
        Statistic.MIN: times.min_us,
        Statistic.MAX: times.max_us,
        Statistic.MED: times.median_us,
        Statistic.AVG: times.mean_us,
        Statistic.STD: times.deviation_us,
        Statistic.NUM: float(times.count),
    }


@dataclass(frozen=True)
class _ByFallback:
    token: object


class KernelTimes:
    """Has CUPTI time the kernels that are launched in sections.

    While torch.profiler runs CUPTI is left to it, and sections are timed by ``fallback``, which is said once.

    Args:
        activity: ``_cupti.Activity``.
        fallback: times sections as a whole.
        profiler: tells when torch.profiler wants CUPTI.

    Raises:
        NoKernelTimesError: another tool holds CUPTI, or there is no driver.
    """

    _numbers: ClassVar[dict[str, int]] = {}
    """Of sections, for all detectors of this process: it has one CUPTI."""

    def __init__(self, activity: Activity, fallback: GpuTimes, profiler: TorchProfiler) -> None:
        self._activity = activity
        self._fallback = fallback
        self._profiler = profiler
        self._has_said = False
        self._is_ours = not profiler.has_cupti()
        if self._is_ours:
            try:
                activity.attach()
            except RuntimeError as error:
                raise NoKernelTimesError(f"{activity.path}: {error}") from error
        profiler.before = self._give_cupti
        self._lost = activity.counts()
        self._coarse_said = False
        self._by_section: dict[str, dict[str, Summary]] = {}
        # What is left of a detector before this one.
        activity.take()

    def begin(self, section: str) -> object:
        entered = self._enter(section)
        if entered is None:
            return _ByFallback(self._fallback.begin(section))
        return entered

    def end(self, section: str, begun: object) -> None:
        if isinstance(begun, _ByFallback):
            self._fallback.end(section, begun.token)
            return
        assert isinstance(begun, int)
        if self._is_ours and self._profiler.has_cupti():
            self._leave_to_profiler()
        self._activity.leave(begun, self._is_ours)

    def summaries(self) -> dict[str, dict[Statistic, float]]:
        """Return what has ended and was read by now; the GPU is not waited for."""
        # What another tool records now is not asked for, what came home before is waited for.
        has_cupti = self._is_ours and not self._profiler.has_cupti()
        read = self._activity.flush if has_cupti else self._activity.drain
        try:
            if not read(_PATIENCE_MS):
                _log.info("records of kernels are still being read: they count in the next report")
        except RuntimeError as error:
            self._say_left(str(error))
        kernels = self._activity.take()
        self._by_section = self._sorted_by_section(kernels)
        self._say_what_is_lost(kernels)
        return {kernel.name: summary(kernel.times) for kernel in kernels} | self._fallback.summaries()

    def section_kernels(self) -> Mapping[str, Mapping[str, Summary]]:
        """Return the kernels of each section in the period of the last :meth:`summaries`."""
        return self._by_section

    def record_counts(self) -> dict[str, int]:
        """Return what became of CUPTI's records since the start: ``kernels``, ``dropped`` and others."""
        return self._activity.counts()

    def _enter(self, section: str) -> int | None:
        """Enter a section with CUPTI; None if another tool has it, or it does not record."""
        if self._profiler.has_cupti():
            self._leave_to_profiler()
            return None
        number = self._numbers.get(section)
        if number is None:
            # Beyond so many kernels belong to no section.
            is_full = len(self._numbers) >= _MOST_SECTIONS
            number = 0 if is_full else self._numbers.setdefault(section, len(self._numbers) + 1)
        try:
            if not self._is_ours:
                # The profiler has put its own callbacks in place of ours.
                self._activity.attach()
                self._is_ours = True
            return self._activity.enter(number)
        except RuntimeError as error:
            self._is_ours = False
            self._say_left(str(error))
            return None

    def _sorted_by_section(self, kernels: Sequence[Kernel]) -> dict[str, dict[str, Summary]]:
        names = {number: name for name, number in self._numbers.items()}
        found: dict[str, dict[str, Summary]] = {}
        for kernel in kernels:
            for number, times in kernel.sections:
                found.setdefault(names[number], {})[kernel.name] = summary(times)
        return found

    def _give_cupti(self) -> None:
        if self._is_ours:
            # Before its callbacks take the place of ours: what was recorded comes home.
            self._activity.release()
        self._leave_to_profiler()

    def _leave_to_profiler(self) -> None:
        self._is_ours = False
        self._say_left("torch.profiler uses CUPTI")

    def _say_left(self, why: str) -> None:
        if not self._has_said:
            self._has_said = True
            _log.warning("%s: meanwhile sections are timed by CUDA events, not kernels one by one", why)

    def _say_what_is_lost(self, kernels: Sequence[Kernel]) -> None:
        before, self._lost = self._lost, self.record_counts()
        lost = {name: count - before[name] for name, count in self._lost.items()}
        if lost["dropped"]:
            _log.warning(
                "CUPTI dropped %d records of kernels in this period (%d requests for a buffer refused)",
                lost["dropped"],
                lost["buffers_refused"],
            )
        if lost["buffers_unreadable"]:
            _log.warning(
                "%d of CUPTI's buffers could be read in part only in this period: kernels are missing",
                lost["buffers_unreadable"],
            )
        coarse = [kernel.name for kernel in kernels if kernel.times.coarse]
        if coarse and not self._coarse_said:
            self._coarse_said = True
            _log.info(
                "times of %d kernels vary too much for a median to 1 %%, first %s", len(coarse), coarse[0]
            )


def open_activity(paths: Iterable[str]) -> Activity:
    """Return CUPTI's activity source from the first library that works.

    Raises:
        NoKernelTimesError: with the reason.
    """
    try:
        from nvrx_slurm.straggler import _cupti
    except ImportError as error:
        raise NoKernelTimesError(
            f"the extension is not built ({error}): installing it needs a C++ compiler and Python's headers"
        ) from error
    why = "libcupti is neither in torch's packages nor in the CUDA toolkit"
    for path in paths:
        try:
            return _cupti.Activity.open(path)
        except RuntimeError as error:
            # The last ones are only names: what a file said is more to the point.
            why = str(error) if "/" in path else why
    raise NoKernelTimesError(why)
