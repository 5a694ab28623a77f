"""``Detector``: what a training script calls."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch

from nvrx_slurm.fault_tolerance.pace_channel import PaceChannel
from nvrx_slurm.straggler.agents import OverAgents
from nvrx_slurm.straggler.callables import CallableId, WrappedCallables
from nvrx_slurm.straggler.exchange import Exchange, ExchangeError
from nvrx_slurm.straggler.gpu import find_gpu_times
from nvrx_slurm.straggler.interval import ReportInterval
from nvrx_slurm.straggler.others import OtherRanks
from nvrx_slurm.straggler.report import Report
from nvrx_slurm.straggler.reporting import RELATIVE, SCORES, ReportGenerator
from nvrx_slurm.straggler.sections import GpuTimes, Sections
from nvrx_slurm.straggler.statistic import Summary

_LONGEST_S = 10**8
"""What a timer of torch can hold."""


@dataclass
class _Running:
    """Everything between :meth:`Detector.initialize` and :meth:`Detector.shutdown`."""

    sections: Sections
    gpu: GpuTimes | None
    generator: ReportGenerator
    interval: ReportInterval
    agents: OverAgents | None
    """This rank's agent hears of every period."""
    by_agents: bool
    """Reports come from there."""
    callables: WrappedCallables
    others: OtherRanks
    interval_elapsed: bool = False

    def meet(self) -> None:
        """Begin anew with other ranks, if there are others than before."""
        if self.others.have_changed():
            self.generator.forget_ranks()
            self.interval.begin_anew()

    def exchange(self) -> Exchange:
        """Return the way to the other ranks.

        Raises:
            ExchangeError: it can't be made.
        """
        self.meet()
        return self.others.exchange()

    def give_up(self, error: ExchangeError) -> None:
        """Report on this rank alone until the ranks meet anew."""
        self.others.give_up(error)
        self.generator.forget_ranks()

    def be_alone(self) -> None:
        """Go on without GPU, agent and other ranks, which are the parent's."""
        self.sections.leave_gpu()
        self.gpu, self.by_agents = None, False
        if self.agents is not None:
            self.agents.close()
            self.agents = None
        self.others.ask_nobody()
        self.generator.forget_ranks()


class Detector:
    """Measures sections of this rank, and compares them with other ranks and other times.

    It is used as a class, of which there is one state per process::

        Detector.initialize()
        for batch in batches:
            with Detector.detection_section("step"):
                step(batch)
            report = Detector.generate_report_if_interval_elapsed()

    A rank that is gone or late costs the others a report, never more than ``timeout_s``.
    """

    _running: ClassVar[_Running | None] = None

    def __new__(cls) -> Detector:
        raise RuntimeError("Detector is not instantiated: call its class methods")

    @classmethod
    def initialize(
        cls,
        scores_to_compute: str | Sequence[str] = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60.0,
        node_name: str | None = None,
        timeout_s: float = 60.0,
        exchange: str = "auto",
    ) -> None:
        """Begin.

        Args:
            scores_to_compute: ``"all"``, or some of ``"relative_perf_scores"`` (to the fastest rank) and
                ``"individual_perf_scores"`` (to this rank's own best).
            gather_on_rank0: rank 0's report has all ranks and others get none; otherwise each has its own.
            profiling_interval: one in so many entries of a section is measured.
            report_time_interval: seconds between reports of :meth:`generate_report_if_interval_elapsed`.
            node_name: of this rank; the host's name by default.
            timeout_s: how long the other ranks are waited for in a report.
            exchange: ``"auto"``: through the agents under nvrx-srun or nvrx-launch, where a report never
                waits and is of the period before; elsewhere, and with ``"torch"``, through
                ``torch.distributed``.

        Raises:
            RuntimeError: it has been called already.
            ValueError: an argument is not accepted.
        """
        if cls._running is not None:
            raise RuntimeError("Detector is initialized already: call Detector.shutdown() first")
        if isinstance(profiling_interval, bool) or not (
            isinstance(profiling_interval, int) and profiling_interval >= 1
        ):
            raise ValueError(f"profiling_interval is {profiling_interval!r}: an integer from 1 is accepted")
        for name, seconds in (("report_time_interval", report_time_interval), ("timeout_s", timeout_s)):
            if not (isinstance(seconds, int | float) and 0 < seconds <= _LONGEST_S):
                raise ValueError(
                    f"{name} is {seconds!r}: seconds above 0 are accepted, {_LONGEST_S} at the most"
                )
        if not (node_name is None or isinstance(node_name, str)):
            raise ValueError(f"node_name is {node_name!r}: a text is accepted")
        if exchange not in ("auto", "torch"):
            raise ValueError(f"exchange is {exchange!r}: 'auto' or 'torch' is accepted")
        scores = _scores(scores_to_compute)
        gpu = find_gpu_times()
        channel = PaceChannel.open()
        cls._running = _Running(
            sections=Sections(profiling_interval, gpu),
            gpu=gpu,
            generator=ReportGenerator(scores, gather_on_rank0, node_name or socket.gethostname()),
            interval=ReportInterval(report_time_interval, profiling_interval),
            agents=None if channel is None else OverAgents(channel, scores, gather_on_rank0),
            by_agents=channel is not None and exchange == "auto",
            callables=WrappedCallables(),
            others=OtherRanks(gather_on_rank0 or RELATIVE in scores, timeout_s),
        )

    @classmethod
    def shutdown(cls) -> None:
        """End, and put wrapped callables back; without :meth:`initialize` it does nothing."""
        running, cls._running = cls._running, None
        if running is not None:
            running.callables.restore()
            # Somebody may still hold a wrapper.
            running.sections.leave_gpu()
            running.others.close()
            if running.agents is not None:
                running.agents.close()

    @classmethod
    def detection_section(
        cls, name: str | None = None, profile_cuda: bool = True
    ) -> AbstractContextManager[None]:
        """Return a context whose body is measured.

        A body that raises is not. A section may be entered within itself and by several threads; each passage
        counts for itself.

        Args:
            name: the same on all ranks; ``file:line`` of the caller by default.
            profile_cuda: measure what the GPU does meanwhile, too, if there is one.

        Raises:
            RuntimeError: before :meth:`initialize`.
            ValueError: the name is empty, or no text.
        """
        running = cls._running
        if running is None:
            raise _not_initialized()
        if name is None:
            caller = sys._getframe(1)
            name = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        return running.sections.enter(name, profile_cuda=profile_cuda)

    @classmethod
    def wrap_callables(cls, callable_ids: Iterable[CallableId], profile_cuda: bool = True) -> None:
        """Run each of the callables as a section with its own name, until :meth:`restore_original_callables`.

        Raises:
            RuntimeError: before :meth:`initialize`.
            AttributeError, TypeError: one of them is not there or can't be called; none is wrapped then.
        """
        sections = cls._require().sections
        cls._require().callables.wrap(
            callable_ids, lambda name: sections.enter(name, profile_cuda=profile_cuda)
        )

    @classmethod
    def restore_original_callables(cls) -> None:
        """Undo all of :meth:`wrap_callables`."""
        cls._require().callables.restore()

    @classmethod
    def generate_report(cls) -> Report | None:
        """End a period, and report on it; every rank calls it, unless nothing is compared or gathered.

        Through the agents, it returns at once, and what it returns is the newest report that has come back.

        Returns:
            None on other ranks than 0 of a gathered report, if no new one has come through the agents, and if
            another rank did not take part, which is said in the log.

        Raises:
            RuntimeError: before :meth:`initialize`.
        """
        running = cls._require()
        sections = running.sections.summaries()
        kernels = running.gpu.summaries() if running.gpu is not None else {}
        if running.agents is not None:
            of_sections: dict[str, dict[str, Summary]] = getattr(running.gpu, "section_kernels", dict)()
            running.agents.tell(sections, kernels, running.generator, of_sections)
            if running.by_agents:
                return running.agents.report(sections, kernels)
        try:
            return running.generator.generate(sections, kernels, running.exchange())
        except ExchangeError as error:
            running.give_up(error)
            return None

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """Call once an iteration on every rank: a report, every ``report_time_interval`` or so.

        Raises:
            RuntimeError: before :meth:`initialize`.
        """
        running = cls._require()
        running.meet()
        if running.agents is not None:
            running.agents.count_iteration()

        def longest(value: float) -> float:
            return -float(running.exchange().smallest(torch.tensor([-value], dtype=torch.float64)))

        try:
            running.interval_elapsed = (
                running.interval.iterate_alone() if running.by_agents else running.interval.iterate(longest)
            )
        except ExchangeError as error:
            running.give_up(error)
            running.interval_elapsed = False
        return cls.generate_report() if running.interval_elapsed else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Tell whether the last :meth:`generate_report_if_interval_elapsed` was due to report.

        Raises:
            RuntimeError: before :meth:`initialize`.
        """
        return cls._require().interval_elapsed

    @classmethod
    def any_rank(cls, flag: bool) -> bool:
        """Tell whether ``flag`` is true on any rank that takes part; all call it in the same iteration.

        A rank that is gone costs ``timeout_s``, and then each goes by its own flag, as reports do.

        Raises:
            RuntimeError: before :meth:`initialize`.
        """
        running = cls._require()
        try:
            return float(running.exchange().smallest(torch.tensor([-float(flag)], dtype=torch.float64))) < 0
        except ExchangeError as error:
            running.give_up(error)
            return flag

    @classmethod
    def _after_fork(cls) -> None:
        """Of a child, such as a worker of a data loader: what it measures is its own."""
        if cls._running is not None:
            cls._running.be_alone()

    @classmethod
    def _require(cls) -> _Running:
        if cls._running is None:
            raise _not_initialized()
        return cls._running


os.register_at_fork(after_in_child=Detector._after_fork)


def _not_initialized() -> RuntimeError:
    return RuntimeError("Detector is not initialized: call Detector.initialize() first")


def _scores(chosen: str | Sequence[str]) -> frozenset[str]:
    if chosen == "all":
        return frozenset(SCORES)
    names = [chosen] if isinstance(chosen, str) else list(chosen) if isinstance(chosen, Collection) else []
    if not names or not all(name in SCORES for name in names):
        raise ValueError(f"scores_to_compute is {chosen!r}: 'all' or some of {', '.join(SCORES)} is accepted")
    return frozenset(names)
