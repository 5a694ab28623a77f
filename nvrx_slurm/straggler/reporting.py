"""Turns the summaries of all ranks into one report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from hashlib import blake2b

import torch

from nvrx_slurm.straggler.arrival import mean_wait_us
from nvrx_slurm.straggler.exchange import Exchange
from nvrx_slurm.straggler.names import Names
from nvrx_slurm.straggler.report import Report
from nvrx_slurm.straggler.scores import BestOfThisRank, gpu_score, medians, own_kernels, section_scores
from nvrx_slurm.straggler.statistic import Summary

RELATIVE = "relative_perf_scores"
INDIVIDUAL = "individual_perf_scores"
SCORES = (RELATIVE, INDIVIDUAL)
_ABSENT = -1.0
"""Stands for a time that a rank does not have: the lowest of all is then below 0, and nobody is compared."""


class ReportGenerator:
    """Keeps what lasts from one report to the next: names, nodes, and this rank's best times.

    Args:
        scores: which of :data:`SCORES`.
        gather_on_rank0: rank 0 gets the scores of all, and the others get no report.
        node: of this rank.
    """

    def __init__(self, scores: frozenset[str], gather_on_rank0: bool, node: str) -> None:
        self._scores = scores
        self._gathers = gather_on_rank0
        self._node = node
        self._best_sections = BestOfThisRank()
        self._best_kernels = BestOfThisRank()
        self.forget_ranks()

    def forget_ranks(self) -> None:
        """The ranks have changed: names and nodes are told anew. This rank's own best times remain."""
        self._sections = Names()
        self._kernels = Names()
        self._nodes: dict[int, str] | None = None

    def generate(
        self, sections: Mapping[str, Summary], kernels: Mapping[str, Summary], exchange: Exchange
    ) -> Report | None:
        """Make the report of a period; every rank calls it, unless nothing is compared or gathered.

        Returns:
            None on other ranks than 0 of a gathered report.

        Raises:
            ExchangeError: another rank did not take part. What was learnt of this one is not lost.
        """
        begun = time.perf_counter()
        section_medians = medians(sections)
        individual_sections, individual_gpu = self.individual(sections, kernels)
        relative_sections: dict[str, float] = {}
        relative_gpu = math.nan
        if RELATIVE in self._scores or self._gathers:
            self._tell_nodes(exchange)
            self._sections.agree(sections, exchange)
        if RELATIVE in self._scores:
            hashed = {_short(name): summary for name, summary in own_kernels(kernels).items()}
            self._kernels.agree(hashed, exchange)
            fastest = exchange.smallest(
                torch.cat(
                    (
                        self._sections.row(section_medians, _ABSENT),
                        self._kernels.row(medians(hashed), _ABSENT),
                    )
                )
            )
            count = len(self._sections)
            relative_sections = section_scores(_references(self._sections, fastest[:count]), sections)
            relative_gpu = gpu_score(_references(self._kernels, fastest[count:]), hashed)
        rows = self._rows(
            exchange,
            (relative_gpu, individual_gpu, mean_wait_us(kernels)),
            (relative_sections, individual_sections, section_medians),
        )
        if rows is None:
            return None
        gpu, of_sections = rows
        nodes = self._nodes or {exchange.rank: self._node}
        return Report(
            gpu_relative_perf_scores=gpu[0] if RELATIVE in self._scores else {},
            section_relative_perf_scores=of_sections[0] if RELATIVE in self._scores else {},
            gpu_individual_perf_scores=gpu[1] if INDIVIDUAL in self._scores else {},
            section_individual_perf_scores=of_sections[1] if INDIVIDUAL in self._scores else {},
            rank_to_node=nodes,
            local_section_summaries=sections,
            local_kernel_summaries=kernels,
            generate_report_elapsed_time=(time.perf_counter() - begun) * 1e3,
            gather_on_rank0=self._gathers,
            rank=exchange.rank,
            section_medians=of_sections[2],
            collective_waits_us=gpu[2],
        )

    def individual(
        self, sections: Mapping[str, Summary], kernels: Mapping[str, Summary]
    ) -> tuple[dict[str, float], float]:
        """Take in one period; return this rank's individual scores: of sections, and of its GPU.

        Both say nothing where they were not asked for.
        """
        if INDIVIDUAL not in self._scores:
            return {}, math.nan
        kernels_of_its_own = own_kernels(kernels)
        best = self._best_sections.update(medians(sections))
        best_kernels = self._best_kernels.update(medians(kernels_of_its_own))
        return section_scores(best, sections), gpu_score(best_kernels, kernels_of_its_own)

    def _tell_nodes(self, exchange: Exchange) -> None:
        if self._nodes is None:
            told = exchange.all_words([self._node])
            self._nodes = {rank: words[0] for rank, words in zip(exchange.ranks, told, strict=True)}

    def _rows(
        self,
        exchange: Exchange,
        gpu: tuple[float, ...],
        sections: tuple[Mapping[str, float], ...],
    ) -> tuple[list[dict[int, float]], list[dict[str, dict[int, float]]]] | None:
        """Return each GPU value by rank, and each section's by name and rank, of the ranks to report on."""
        if not self._gathers:
            own = exchange.rank
            return (
                [{own: value} for value in gpu],
                [{name: {own: value} for name, value in values.items()} for values in sections],
            )
        own_row = torch.cat(
            (
                torch.tensor(gpu, dtype=torch.float64),
                *(self._sections.row(values, math.nan) for values in sections),
            )
        )
        gathered = exchange.gather(own_row)
        if gathered is None:
            return None
        count = len(self._sections)
        columns = gathered.T.tolist()
        ranks = exchange.ranks
        of_gpu = [dict(zip(ranks, column, strict=True)) for column in columns[: len(gpu)]]
        of_sections = []
        for index in range(len(sections)):
            first = len(gpu) + index * count
            block = zip(self._sections, columns[first : first + count], strict=True)
            of_sections.append({name: dict(zip(ranks, column, strict=True)) for name, column in block})
        return of_gpu, of_sections


def _short(kernel: str) -> str:
    """Return what stands for a kernel among ranks: mangled names are long, and nobody reads them there."""
    return blake2b(kernel.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _references(names: Names, fastest: torch.Tensor) -> dict[str, float]:
    return {name: value for name, value in zip(names, fastest.tolist(), strict=True) if value >= 0}
