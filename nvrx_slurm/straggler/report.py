"""The result of one period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from nvrx_slurm.pace import Kernel, KernelTime
from nvrx_slurm.straggler.arrival import lateness
from nvrx_slurm.straggler.statistic import Summary


@dataclass(frozen=True)
class StragglerId:
    """A slow rank and where it runs."""

    rank: int
    node: str


class Stragglers(TypedDict):
    """What :meth:`Report.identify_stragglers` returns; sections without a straggler are left out."""

    straggler_gpus_relative: set[StragglerId]
    straggler_gpus_individual: set[StragglerId]
    straggler_sections_relative: dict[str, set[StragglerId]]
    straggler_sections_individual: dict[str, set[StragglerId]]


@dataclass(frozen=True)
class Report:
    """Scores of one period, from 0 to 1, by rank: of all on rank 0 of a gathered report, else of this one.

    NaN means that there was nothing to compare. A kind of score that was not asked for is empty.
    """

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Summary]
    """Of this rank, in milliseconds."""
    local_kernel_summaries: Mapping[str, Summary]
    """Of this rank, in microseconds."""
    generate_report_elapsed_time: float
    """Milliseconds that making this report took."""
    gather_on_rank0: bool
    rank: int
    section_medians: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Milliseconds; what :class:`~nvrx_slurm.pace.Watch` judges by."""
    passages: Mapping[str, float] = field(default_factory=dict)
    """How often an iteration passes through a section; one that is missing: once."""
    iterations: float = 0.0
    """Of the period; 0: they are not counted."""
    kernel_times: Mapping[Kernel, Mapping[int, KernelTime]] = field(default_factory=dict)
    """Of the ranks; empty where they are not exchanged."""
    gpus: Mapping[int, str] = field(default_factory=dict)
    """The UUID of each rank's GPU, as far as it is known."""
    collective_waits_us: Mapping[int, float] = field(default_factory=dict)
    """The mean time of a NCCL kernel by rank, NaN without one; most of it is waiting for the last rank."""

    def arrival_lateness_us(self) -> dict[int, float]:
        """Return how much later than the first one each rank comes to a collective, in the mean.

        It is told by ``collective_waits_us``, so it is right among ranks that take part in the same ones.
        """
        return lateness(self.collective_waits_us)

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = 0.75,
        section_rel_threshold: float = 0.75,
        gpu_indiv_threshold: float = 0.75,
        section_indiv_threshold: float = 0.75,
    ) -> Stragglers:
        """Return who scores below the thresholds in this one period.

        A single report is noisy: before anything is done about a rank, let several be judged by a
        :class:`~nvrx_slurm.pace.Watch`.
        """

        def below(scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
            # NaN compares false.
            return {
                StragglerId(rank, self.rank_to_node[rank])
                for rank, value in scores.items()
                if value < threshold
            }

        def by_section(
            scores: Mapping[str, Mapping[int, float]], threshold: float
        ) -> dict[str, set[StragglerId]]:
            found = {name: below(of_ranks, threshold) for name, of_ranks in scores.items()}
            return {name: slow for name, slow in found.items() if slow}

        return {
            "straggler_gpus_relative": below(self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": below(self.gpu_individual_perf_scores, gpu_indiv_threshold),
            "straggler_sections_relative": by_section(
                self.section_relative_perf_scores, section_rel_threshold
            ),
            "straggler_sections_individual": by_section(
                self.section_individual_perf_scores, section_indiv_threshold
            ),
        }
