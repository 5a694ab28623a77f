"""Straggler detection without processes: ranks are threads that meet at a barrier."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.pace import Watch
from nvrx_slurm.straggler import CallableId, Detector, Report, Statistic, StragglerId
from nvrx_slurm.straggler.callables import WrappedCallables
from nvrx_slurm.straggler.exchange import Alone
from nvrx_slurm.straggler.interval import ReportInterval
from nvrx_slurm.straggler.reporting import SCORES, ReportGenerator
from nvrx_slurm.straggler.sections import MAX_SAMPLES, Sections
from nvrx_slurm.straggler.statistic import Summary, summarize

T = TypeVar("T")
ALL = frozenset(SCORES)


class Meeting:
    """What ranks, each a thread, hand each other."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=10)
        self.handed: list[object] = [None] * ranks
        self.words_sent = 0

    def swap(self, rank: int, value: T) -> list[T]:
        self.handed[rank] = value
        self.barrier.wait()
        seen = list(self.handed)
        self.barrier.wait()
        return seen  # type: ignore[return-value]


class ThreadRank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.ranks = range(len(meeting.handed))

    def smallest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.swap(self.rank, values)).amin(0)

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        rows = self._meeting.swap(self.rank, values)
        return torch.stack(rows) if self.rank == 0 else None

    def all_words(self, words: Sequence[str]) -> list[list[str]]:
        self._meeting.words_sent += 1
        return self._meeting.swap(self.rank, list(words))


class Ranks:
    """Several report generators that report together."""

    def __init__(self, count: int, scores: frozenset[str] = ALL, gather: bool = True) -> None:
        self.meeting = Meeting(count)
        self.generators = [ReportGenerator(scores, gather, f"n{rank // 2}") for rank in range(count)]

    def report(
        self,
        sections: Sequence[Mapping[str, Sequence[float]]],
        kernels: Sequence[Mapping[str, Sequence[float]]] | None = None,
    ) -> list[Report | None]:
        kernels = kernels or [{} for _ in sections]

        def one(rank: int) -> Report | None:
            return self.generators[rank].generate(
                summaries(sections[rank]), summaries(kernels[rank]), ThreadRank(self.meeting, rank)
            )

        with ThreadPoolExecutor(len(self.generators)) as threads:
            return list(threads.map(one, range(len(self.generators))))

    def report_of_all(
        self,
        sections: Sequence[Mapping[str, Sequence[float]]],
        kernels: Sequence[Mapping[str, Sequence[float]]] | None = None,
    ) -> Report:
        report = self.report(sections, kernels)[0]
        assert report is not None
        return report


def summaries(samples: Mapping[str, Sequence[float]]) -> dict[str, Summary]:
    return {name: summary for name, times in samples.items() if (summary := summarize(times))}


def alone(scores: frozenset[str] = ALL) -> Callable[[Mapping[str, Sequence[float]]], Report]:
    generator = ReportGenerator(scores, True, "n0")

    def report(kernels: Mapping[str, Sequence[float]]) -> Report:
        found = generator.generate({}, summaries(kernels), Alone(0))
        assert found is not None
        return found

    return report


# --- statistics ------------------------------------------------------------------------------------------


def test_the_median_is_the_lower_one_and_one_sample_has_no_deviation() -> None:
    found = summarize([4.0, 1.0, 2.0, 3.0])
    assert found[Statistic.MED] == 2.0
    assert found[Statistic.STD] == pytest.approx(math.sqrt(5 / 3))
    assert (found[Statistic.MIN], found[Statistic.MAX], found[Statistic.NUM]) == (1.0, 4.0, 4.0)
    assert math.isnan(summarize([7.0])[Statistic.STD])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_what_is_no_duration_is_left_out(samples: list[float]) -> None:
    usable = [sample for sample in samples if math.isfinite(sample) and sample >= 0]
    found = summarize(samples)
    assert found.get(Statistic.NUM, 0) == len(usable)
    if usable:
        assert found[Statistic.MIN] <= found[Statistic.MED] <= found[Statistic.MAX]


# --- individual scores -----------------------------------------------------------------------------------


def test_individual_scores_compare_with_the_best_period_so_far() -> None:
    report = alone()
    gpu = [
        report({"k": [times]}).gpu_individual_perf_scores[0] for times in (100.0, 125.0, 200.0, 50.0, 100.0)
    ]
    assert gpu == [1.0, 0.8, 0.5, 1.0, 0.5]


def test_kernels_that_come_and_go_are_compared_when_they_are_there() -> None:
    report = alone()
    assert report({"a": [1.0], "b": [1.0]}).gpu_individual_perf_scores[0] == 1.0
    assert report({"a": [2.0]}).gpu_individual_perf_scores[0] == 0.5
    assert report({"new": [9.0]}).gpu_individual_perf_scores[0] == 1.0
    assert math.isnan(report({}).gpu_individual_perf_scores[0])


def test_long_kernels_weigh_more_and_those_that_wait_for_others_nothing() -> None:
    report = alone()
    report({"long": [90.0], "short": [10.0], "ncclDevKernel_AllReduce": [1.0]})
    slower = report({"long": [180.0], "short": [10.0], "ncclDevKernel_AllReduce": [1000.0]})
    assert slower.gpu_individual_perf_scores[0] == pytest.approx((180 * 0.5 + 10 * 1.0) / 190)


# --- relative scores -------------------------------------------------------------------------------------


def test_relative_scores_compare_with_the_fastest_rank() -> None:
    times = [{"k": [100.0 * (rank + 1)]} for rank in range(4)]
    report = Ranks(4).report_of_all(times, times)
    expected = {0: 1.0, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4}
    assert report.gpu_relative_perf_scores == pytest.approx(expected)
    assert report.section_relative_perf_scores == {"k": pytest.approx(expected)}
    assert report.rank_to_node == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    slow = report.identify_stragglers()
    assert slow["straggler_gpus_relative"] == {StragglerId(rank, f"n{rank // 2}") for rank in (1, 2, 3)}
    assert slow["straggler_gpus_individual"] == set()
    assert slow["straggler_sections_individual"] == {}


def test_only_what_every_rank_has_is_compared() -> None:
    kernels = [{"common": [1.0 + rank], f"of{rank}": [50.0]} for rank in range(2)]
    report = Ranks(2).report_of_all([{}, {}], kernels)
    assert report.gpu_relative_perf_scores == {0: 1.0, 1: 0.5}
    nothing = Ranks(2).report_of_all([{"a": [1.0]}, {"b": [1.0]}], [{"a": [1.0]}, {"b": [2.0]}])
    assert all(math.isnan(score) for score in nothing.gpu_relative_perf_scores.values())
    assert nothing.identify_stragglers()["straggler_sections_relative"] == {}


def test_a_section_half_as_slow_again_is_found_and_no_other() -> None:
    report = Ranks(3).report_of_all(
        [
            {"step": [10.0, 10.1], "load": [3.0]},
            {"step": [15.0, 15.1], "load": [3.1]},
            {"step": [10.2], "load": [3.0]},
        ]
    )
    assert report.identify_stragglers()["straggler_sections_relative"] == {"step": {StragglerId(1, "n0")}}


def test_the_threshold_itself_is_fast_enough() -> None:
    report = Ranks(2).report_of_all([{"step": [3.0]}, {"step": [4.0]}])
    assert report.identify_stragglers(section_rel_threshold=0.75)["straggler_sections_relative"] == {}


def test_without_gathering_each_rank_reports_on_itself() -> None:
    reports = Ranks(2, gather=False).report([{"step": [1.0]}, {"step": [2.0]}])
    for rank, report in enumerate(reports):
        assert report is not None
        assert report.section_relative_perf_scores == {"step": {rank: 1 / (rank + 1)}}
        assert report.rank_to_node[rank] == "n0"


def test_names_travel_only_when_one_is_new() -> None:
    ranks = Ranks(2)
    period = [{"step": [1.0]}, {"step": [1.0]}]
    sent = []
    for more in ({}, {}, {"eval": [2.0]}, {}):
        before = ranks.meeting.words_sent
        ranks.report([period[0], {**period[1], **more}])
        sent.append((ranks.meeting.words_sent - before) // 2)
    assert sent == [2, 0, 1, 0], "nodes and names at first"


def test_kernels_travel_as_short_hashes() -> None:
    """Names are the most of a first report: 300 bytes for each, of every rank to every other."""
    ranks = Ranks(2)
    told: list[str] = []
    swap = ranks.meeting.swap
    ranks.meeting.swap = lambda rank, value: (  # type: ignore[method-assign]
        told.extend(value if isinstance(value, list) else []) or swap(rank, value)
    )
    report = ranks.report_of_all(
        [{"step": [1.0]}] * 2, [{"_ZN2at6native" * 25: [time]} for time in (1.0, 2.0)]
    )
    assert report.gpu_relative_perf_scores == {0: 1.0, 1: 0.5}
    assert {len(word) for word in told} == {len("n0"), len("step"), 16}


def test_a_score_that_was_not_asked_for_is_empty() -> None:
    report = Ranks(2, scores=frozenset({"individual_perf_scores"})).report_of_all(
        [{"a": [1.0]}, {"a": [2.0]}]
    )
    assert report.gpu_relative_perf_scores == report.section_relative_perf_scores == {}
    assert report.section_individual_perf_scores == {"a": {0: 1.0, 1: 1.0}}


def test_a_time_of_zero_is_as_good_as_any() -> None:
    report = Ranks(2).report_of_all([{"a": [0.0]}, {"a": [0.0]}])
    assert report.section_relative_perf_scores == {"a": {0: 1.0, 1: 1.0}}


def test_a_period_without_samples_is_no_fault() -> None:
    report = Ranks(2).report_of_all([{}, {}])
    assert report.section_relative_perf_scores == {}
    assert not any(report.identify_stragglers().values())


# --- several reports -------------------------------------------------------------------------------------


def periods(count: int, ranks: int = 8, **slow: float) -> Iterator[Report]:
    """Reports with a little noise, in which rank N takes ``rN`` times as long."""
    together = Ranks(ranks)
    for period in range(count):
        yield together.report_of_all(
            [
                {"step": [10.0 * slow.get(f"r{rank}", 1.0) + 0.1 * ((rank + period) % 3)]}
                for rank in range(ranks)
            ]
        )


def test_a_slow_rank_is_named_in_the_second_report() -> None:
    watch = Watch()
    found = [watch.add(report) for report in periods(3, r5=1.5)]
    assert found[0] == []
    (verdict,) = found[1]
    assert (verdict.rank, verdict.node, verdict.section) == (5, "n2", "step")
    assert verdict.lost_ms == pytest.approx(5.0, abs=0.3)
    assert verdict.score == pytest.approx(10 / 15, abs=0.02)
    assert (verdict.confidence, found[2][0].confidence) == (2 / 3, 1.0)


def test_a_fast_rank_makes_nobody_else_slow() -> None:
    watch = Watch()
    for report in periods(4, r2=0.5):
        assert report.identify_stragglers()["straggler_sections_relative"], "as other tools have it"
        assert watch.add(report) == []


def test_when_all_are_slower_only_the_individual_score_says_so() -> None:
    ranks, watch = Ranks(4), Watch()
    ranks.report_of_all([{"step": [10.0]}] * 4)
    for _ in range(3):
        report = ranks.report_of_all([{"step": [20.0]}] * 4)
        assert watch.add(report) == []
        slow = report.identify_stragglers()
        assert slow["straggler_sections_relative"] == {}
        assert len(slow["straggler_sections_individual"]["step"]) == 4


def test_who_is_slow_once_or_has_recovered_is_not_named() -> None:
    ranks, watch = Ranks(4), Watch()
    for factor in (2.0, 1.0, 1.0, 2.0, 1.0):
        times = [{"step": [10.0 * (factor if rank == 1 else 1.0)]} for rank in range(4)]
        assert watch.add(ranks.report_of_all(times)) == []


def test_ranks_with_other_work_are_compared_among_themselves() -> None:
    ranks, watch = Ranks(8), Watch()
    for _ in range(3):
        times: list[dict[str, list[float]]] = [
            {"step": [10.0]} if rank < 4 else {"step": [30.0], "head": [5.0]} for rank in range(8)
        ]
        assert watch.add(ranks.report_of_all(times)) == []


@pytest.mark.parametrize("others", [{"step": 10.0}, {"step": 10.0, "load": 3.0}])
def test_a_rank_that_does_something_more_is_compared_in_the_rest(others: dict[str, float]) -> None:
    ranks, watch = Ranks(4), Watch()
    for number in range(3):
        times = [{name: [time] for name, time in others.items()} for _ in range(4)]
        times[0] = {**times[0], "step": [20.0], "log": [100.0]}
        named = watch.add(ranks.report_of_all(times))
        assert [(verdict.rank, verdict.section) for verdict in named] == ([(0, "step")] if number else [])


def test_scatter_as_wide_as_the_difference_names_nobody() -> None:
    ranks, watch = Ranks(6), Watch()
    for _ in range(3):
        times = [{"step": [value]} for value in (4.0, 6.0, 8.0, 10.0, 12.0, 14.0)]
        assert watch.add(ranks.report_of_all(times)) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"threshold": 1.0}, "threshold"),
        ({"slow_reports": 1}, "slow_reports"),
        ({"slow_reports": 4}, "slow_reports"),
        ({"deviations": -1.0}, "deviations"),
    ],
)
def test_a_watch_refuses_what_makes_no_sense(arguments: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Watch(**arguments)  # type: ignore[arg-type]


# --- sections --------------------------------------------------------------------------------------------


def test_a_body_that_raises_is_not_measured_and_one_within_itself_counts_for_itself() -> None:
    sections = Sections()
    with pytest.raises(KeyError), sections.enter("a", profile_cuda=False):
        raise KeyError
    assert sections.summaries() == {}
    with sections.enter("a", profile_cuda=True), sections.enter("a", profile_cuda=True):
        pass
    assert sections.summaries()["a"][Statistic.NUM] == 2
    assert sections.summaries() == {}, "a new period"


def test_unbalanced_use_of_a_section_measures_nothing_that_was_not() -> None:
    sections = Sections()
    never_left, never_entered = (
        sections.enter("a", profile_cuda=False),
        sections.enter("a", profile_cuda=False),
    )
    never_left.__enter__()
    never_entered.__exit__(None, None, None)
    assert sections.summaries() == {}
    with (twice := sections.enter("a", profile_cuda=False)):
        pass
    twice.__exit__(None, None, None)
    assert sections.summaries()["a"][Statistic.NUM] == 1


def test_one_in_so_many_entries_is_measured_the_first_among_them() -> None:
    sections = Sections(profiling_interval=2)
    for _ in range(5):
        with sections.enter("a", profile_cuda=False):
            pass
    assert sections.summaries()["a"][Statistic.NUM] == 3


def test_threads_may_be_in_one_section_at_once() -> None:
    sections, both = Sections(), threading.Barrier(8, timeout=10)

    def work() -> None:
        for _ in range(100):
            with sections.enter("load", profile_cuda=False):
                both.wait()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sections.summaries()["load"][Statistic.NUM] == 800


def test_the_oldest_samples_go() -> None:
    sections = Sections()
    for _ in range(MAX_SAMPLES + 10):
        with sections.enter("a", profile_cuda=False):
            pass
    assert sections.summaries()["a"][Statistic.NUM] == MAX_SAMPLES


class FakeGpu:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, section: str) -> object:
        return None

    def end(self, section: str, begun: object) -> None:
        self.seen.append(section)

    def summaries(self) -> dict[str, dict[Statistic, float]]:
        return {}


def test_the_gpu_is_measured_where_it_was_asked_for() -> None:
    gpu = FakeGpu()
    sections = Sections(gpu=gpu)
    with sections.enter("a", profile_cuda=True), sections.enter("b", profile_cuda=False):
        pass
    with pytest.raises(KeyError), sections.enter("c", profile_cuda=True):
        raise KeyError
    assert gpu.seen == ["a", ""], "what began is given back in any case"


# --- callables -------------------------------------------------------------------------------------------


class Model:
    def step(self, x: int) -> int:
        return x + 1

    @staticmethod
    def static(x: int) -> int:
        return x * 2

    @classmethod
    def made(cls) -> str:
        return cls.__name__


def test_callables_run_under_their_names_and_come_back() -> None:
    sections, wrapped, model = Sections(), WrappedCallables(), Model()
    module = SimpleNamespace(f=lambda: 7)

    def enter(name: str):  # type: ignore[no-untyped-def]
        return sections.enter(name, profile_cuda=False)

    wrapped.wrap([CallableId(Model, "static"), CallableId(Model, "made"), CallableId(model, "step")], enter)
    wrapped.wrap([CallableId(module, "f")], enter)
    assert (model.step(1), Model.static(4), Model.made(), model.made(), module.f()) == (
        2,
        8,
        "Model",
        "Model",
        7,
    )
    assert sorted(sections.summaries()) == [
        "Model.step",
        "SimpleNamespace.f",
        f"{__name__}.Model.made",
        f"{__name__}.Model.static",
    ]
    wrapped.restore()
    assert (model.step(1), Model.static(4), Model.made(), module.f()) == (2, 8, "Model", 7)
    assert sections.summaries() == {}
    assert "step" not in vars(model)


def test_nothing_is_wrapped_if_one_of_them_is_not_there() -> None:
    wrapped, model = WrappedCallables(), Model()
    with pytest.raises(AttributeError):
        wrapped.wrap(
            [CallableId(model, "step"), CallableId(model, "nothing")], lambda name: pytest.fail(name)
        )
    assert model.step(1) == 2


# --- the interval ----------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def due(interval: ReportInterval, clock: Clock, lengths: Sequence[float], factor: float = 1.0) -> list[int]:
    found = []
    for number, length in enumerate(lengths):
        clock.now += length
        if interval.iterate(lambda value: value * factor):
            found.append(number)
    return found


def test_reports_come_every_so_many_iterations_once_their_length_is_known() -> None:
    clock = Clock()
    interval = ReportInterval(5.0, 1, clock)
    assert due(interval, clock, [1.0] * 30) == [21, 26]


def test_when_iterations_become_longer_there_are_fewer_between_reports() -> None:
    clock = Clock()
    interval = ReportInterval(20.0, 1, clock)
    assert due(interval, clock, [1.0] * 17 + [5.0] * 40) == [36, 40, 44, 48, 52, 56]


def test_no_fewer_than_are_measured_and_as_many_as_the_slowest_rank_needs() -> None:
    clock = Clock()
    assert due(ReportInterval(0.001, 7, clock), clock, [1.0] * 32) == [23, 30]
    clock = Clock()
    assert due(ReportInterval(5.0, 1, clock), clock, [1.0] * 40, factor=2.0) == [26, 36]


# --- the detector ----------------------------------------------------------------------------------------


@pytest.fixture
def detector() -> Iterator[type[Detector]]:
    yield Detector
    Detector.shutdown()


def test_a_script_measures_and_reports(detector: type[Detector]) -> None:
    detector.initialize(node_name="here")
    with detector.detection_section("step"):
        pass
    with detector.detection_section():
        pass
    report = detector.generate_report()
    assert report is not None
    assert report.section_relative_perf_scores["step"] == {0: 1.0}
    assert report.rank_to_node == {0: "here"}
    (unnamed,) = report.local_section_summaries.keys() - {"step"}
    assert unnamed.startswith(f"{__file__}:")
    assert detector.generate_report_if_interval_elapsed() is None
    assert not detector.is_interval_elapsed()


def test_it_says_what_is_missing(detector: type[Detector]) -> None:
    for call in (
        detector.generate_report,
        detector.detection_section,
        detector.generate_report_if_interval_elapsed,
        detector.is_interval_elapsed,
        detector.restore_original_callables,
    ):
        with pytest.raises(RuntimeError, match=r"call Detector\.initialize\(\) first"):
            call()
    with pytest.raises(RuntimeError, match="not instantiated"):
        detector()
    detector.shutdown()
    detector.initialize()
    with pytest.raises(RuntimeError, match="initialized already"):
        detector.initialize()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"scores_to_compute": "none"}, "scores_to_compute is 'none'"),
        ({"scores_to_compute": []}, "scores_to_compute"),
        ({"profiling_interval": 0}, "profiling_interval is 0: an integer from 1 is accepted"),
        ({"profiling_interval": True}, "profiling_interval is True"),
        ({"report_time_interval": 0}, "report_time_interval is 0: seconds above 0 are accepted"),
        ({"timeout_s": math.nan}, "timeout_s is nan"),
        ({"exchange": "pigeon"}, "exchange is 'pigeon': 'auto' or 'torch' is accepted"),
    ],
)
def test_bad_arguments_are_refused(
    detector: type[Detector], arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        detector.initialize(**arguments)  # type: ignore[arg-type]


def test_the_example_of_the_page_runs(detector: type[Detector]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "straggler.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        batches = iter(range(30))
        exec(example, {"steps": 30, "batches": batches, "model": lambda batch: batch})
        assert next(batches, None) is None
