"""Reports through the agents of nvrx-srun: nothing of training is used, and nobody is waited for.

A rank tells its agent what it took; the Coordinator compares all ranks, and what it finds comes back as a
file on the node. So a report is of the period before, and a rank that is gone is missing in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from nvrx_slurm.fault_tolerance.pace_channel import PaceChannel, SectionPeriod
from nvrx_slurm.pace import Kernel, KernelTime
from nvrx_slurm.pace.exchange import Scores
from nvrx_slurm.straggler.report import Report
from nvrx_slurm.straggler.reporting import INDIVIDUAL, RELATIVE, ReportGenerator
from nvrx_slurm.straggler.scores import own_kernels
from nvrx_slurm.straggler.statistic import Statistic, Summary

_SECTION = "section:"
"""Begins what stands for a kernel where sections are timed by CUDA events."""


class OverAgents:
    """Of one rank.

    Args:
        scores: which of :data:`~nvrx_slurm.straggler.reporting.SCORES`.
        gathers: rank 0 gets a report on all ranks and others none; otherwise each has its own.
    """

    def __init__(self, channel: PaceChannel, scores: frozenset[str], gathers: bool) -> None:
        self._channel = channel
        self._scores = scores
        self._gathers = gathers
        self._iterations = 0

    def count_iteration(self) -> None:
        """Note that an iteration of training has ended."""
        self._iterations += 1

    def tell(
        self,
        sections: Mapping[str, Summary],
        kernels: Mapping[str, Summary],
        generator: ReportGenerator,
        of_sections: Mapping[str, Mapping[str, Summary]],
    ) -> None:
        """Tell one period.

        Args:
            generator: knows this rank's best times.
            of_sections: which kernels each section has launched, as far as that is known.
        """
        individual, gpu = generator.individual(sections, kernels)
        self._channel.tell(
            {
                name: SectionPeriod(summary[Statistic.MED], int(summary[Statistic.NUM]), individual.get(name))
                for name, summary in sections.items()
            },
            kernel_times(kernels, of_sections),
            iterations=self._iterations,
            gpu_individual=None if math.isnan(gpu) else gpu,
            gpu=gpu_uuid(),
            gathers=self._gathers,
        )
        self._iterations = 0

    def report(self, sections: Mapping[str, Summary], kernels: Mapping[str, Summary]) -> Report | None:
        """Return the newest report that has come since the last call; None: none has."""
        begun = time.perf_counter()
        scores = self._channel.scores()
        if scores is None:
            return None
        relative, individual = RELATIVE in self._scores, INDIVIDUAL in self._scores
        return Report(
            gpu_relative_perf_scores=_by_rank(scores, scores.gpu_relative) if relative else {},
            section_relative_perf_scores=_by_section(scores, scores.relative) if relative else {},
            gpu_individual_perf_scores=_by_rank(scores, scores.gpu_individual) if individual else {},
            section_individual_perf_scores=_by_section(scores, scores.individual) if individual else {},
            rank_to_node=dict(zip(scores.ranks, scores.nodes, strict=True)),
            local_section_summaries=sections,
            local_kernel_summaries=kernels,
            generate_report_elapsed_time=(time.perf_counter() - begun) * 1e3,
            gather_on_rank0=self._gathers,
            rank=self._channel.rank,
            section_medians=_by_section(scores, scores.medians_ms),
        )

    def close(self) -> None:
        self._channel.close()


def kernel_times(
    kernels: Mapping[str, Summary], of_sections: Mapping[str, Mapping[str, Summary]]
) -> dict[Kernel, KernelTime]:
    """Return what travels of the kernels that do not wait for other ranks, by section where that is known."""
    attributed = {
        Kernel(name, section): _kernel_time(summary)
        for section, own in of_sections.items()
        for name, summary in own_kernels(own).items()
    }
    known = {kernel.name for kernel in attributed}
    whole = {
        Kernel(name, name.removeprefix(_SECTION) if name.startswith(_SECTION) else ""): _kernel_time(summary)
        for name, summary in own_kernels(kernels).items()
        if name not in known
    }
    return {**attributed, **whole}


def _kernel_time(summary: Summary) -> KernelTime:
    return KernelTime(summary[Statistic.MED], summary[Statistic.NUM] * summary[Statistic.AVG])


def gpu_uuid() -> str:
    """Return the UUID of this rank's GPU as NVML writes it; empty: it uses none, or torch does not tell."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"


def _by_rank(scores: Scores, column: list[float]) -> dict[int, float]:
    return dict(zip(scores.ranks, column, strict=True))


def _by_section(scores: Scores, columns: list[list[float]]) -> dict[str, dict[int, float]]:
    named = zip(scores.sections, columns, strict=True)
    return {section: _by_rank(scores, column) for section, column in named}
