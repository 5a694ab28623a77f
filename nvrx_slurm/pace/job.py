"""The times of a job's ranks, as their nodes tell them, judged together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from nvrx_slurm.pace.exchange import Name, Period, Scores
from nvrx_slurm.pace.measured import COLLECTIVE, Kernel, KernelTime, score
from nvrx_slurm.pace.verdict import StragglerVerdict
from nvrx_slurm.pace.watch import Judgement, Watch


@dataclass(frozen=True)
class RankPeriod:
    """One rank's, where it runs."""

    node: str
    names: Sequence[Name]
    period: Period
    context: Sequence[str] = ()


@dataclass
class AllRanks:
    """One period of all ranks; a :class:`~nvrx_slurm.pace.measured.Measured`."""

    section_medians: dict[str, dict[int, float]] = field(default_factory=dict)
    rank_to_node: dict[int, str] = field(default_factory=dict)
    passages: dict[str, float] = field(default_factory=dict)
    iterations: float = 0.0
    kernel_times: dict[Kernel, dict[int, KernelTime]] = field(default_factory=dict)
    gpus: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: Mapping[int, RankPeriod]) -> AllRanks:
        """Put the ranks' periods side by side."""
        found = cls(iterations=max((each.period.iterations for each in ranks.values()), default=0))
        sections: defaultdict[str, dict[int, float]] = defaultdict(dict)
        kernels: defaultdict[Name, dict[int, KernelTime]] = defaultdict(dict)
        for rank, each in ranks.items():
            period, names = each.period, each.names
            found.rank_to_node[rank] = each.node
            if period.gpu:
                found.gpus[rank] = period.gpu
            for time in period.sections:
                section = names[time.number].section
                sections[section][rank] = time.median_ms
                if period.iterations > 0:
                    passages = time.passages / period.iterations
                    found.passages[section] = max(passages, found.passages.get(section, 0.0))
            for sum_ in period.kernels:
                kernels[names[sum_.number]][rank] = KernelTime(sum_.median_us, sum_.total_us)
        found.section_medians = dict(sections)
        found.kernel_times = {
            Kernel(name.kernel, name.section): times
            for name, times in kernels.items()
            if COLLECTIVE not in name.kernel
        }
        return found


@dataclass(frozen=True)
class Outcome:
    """What one report of all ranks says."""

    judgement: Judgement
    scores: Scores
    """Of all ranks."""


class JobPace:
    """Judges report after report; keeps what lasts over restarts."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch or Watch()
        self._reports = 0

    def judge(self, ranks: Mapping[int, RankPeriod]) -> Outcome:
        """Take the periods of all ranks that have told theirs."""
        self._reports += 1
        measured = AllRanks.of(ranks)
        judgement = self._watch.judge(measured)
        verdicts = [_with_context(verdict, ranks) for verdict in judgement.verdicts]
        return Outcome(replace(judgement, verdicts=verdicts), _scores(self._reports, ranks, measured))


def _with_context(verdict: StragglerVerdict, ranks: Mapping[int, RankPeriod]) -> StragglerVerdict:
    return msgspec.structs.replace(verdict, context=list(ranks[verdict.rank].context))


def _scores(report: int, ranks: Mapping[int, RankPeriod], measured: AllRanks) -> Scores:
    order = sorted(ranks)
    names = list(measured.section_medians)
    individual: dict[str, dict[int, float]] = {name: {} for name in names}
    for rank, each in ranks.items():
        for time in each.period.sections:
            if time.individual is not None:
                individual[each.names[time.number].section][rank] = time.individual
    medians = [_column(measured.section_medians[name], order) for name in names]
    gpu = _relative_of_gpus(measured.kernel_times, order)
    return Scores(
        report=report,
        ranks=order,
        nodes=[ranks[rank].node for rank in order],
        sections=names,
        relative=[_relative(column) for column in medians],
        individual=[_column(individual[name], order) for name in names],
        medians_ms=medians,
        gpu_relative=[gpu.get(rank, math.nan) for rank in order],
        gpu_individual=[
            math.nan if (own := ranks[rank].period.gpu_individual) is None else own for rank in order
        ],
    )


def _column(values: Mapping[int, float], order: Sequence[int]) -> list[float]:
    return [values.get(rank, math.nan) for rank in order]


def _relative(times: Sequence[float]) -> list[float]:
    """Compare with the fastest; where a rank has no time there is no comparison, as the peer has it."""
    if any(math.isnan(time) for time in times):
        return [math.nan] * len(times)
    fastest = min(times)
    return [score(fastest, time) for time in times]


def _relative_of_gpus(
    kernels: Mapping[Kernel, Mapping[int, KernelTime]], order: Sequence[int]
) -> dict[int, float]:
    weighed: defaultdict[int, float] = defaultdict(float)
    total: defaultdict[int, float] = defaultdict(float)
    for of_ranks in kernels.values():
        if len(of_ranks) == len(order):
            fastest = min(time.median_us for time in of_ranks.values())
            for rank, time in of_ranks.items():
                weighed[rank] += time.total_us * score(fastest, time.median_us)
                total[rank] += time.total_us
    return {rank: weighed[rank] / total[rank] for rank in total if total[rank] > 0}
