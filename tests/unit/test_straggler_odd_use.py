"""What nobody should do with a detector, and what comes of it."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import os
import random
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nvrx_slurm.pace.names import MOST_NAMES
from nvrx_slurm.straggler import CallableId, Detector, Report, Statistic
from nvrx_slurm.straggler.exchange import Alone
from nvrx_slurm.straggler.gpu import EventTimes
from nvrx_slurm.straggler.interval import ReportInterval
from nvrx_slurm.straggler.names import Names
from nvrx_slurm.straggler.reporting import SCORES, ReportGenerator
from nvrx_slurm.straggler.scores import BestOfThisRank
from nvrx_slurm.straggler.sections import Sections
from nvrx_slurm.straggler.statistic import summarize


@pytest.fixture
def detector() -> Iterator[type[Detector]]:
    Detector.initialize()
    yield Detector
    Detector.shutdown()


def sections_of_report() -> set[str]:
    report = Detector.generate_report()
    assert isinstance(report, Report)
    return set(report.local_section_summaries)


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", 5, b"step", ("step",)])
def test_what_is_no_name_is_refused_where_it_is_used(detector: type[Detector], name: Any) -> None:
    with pytest.raises(ValueError, match="a text that is not empty is accepted"):
        detector.detection_section(name)


def test_ever_new_sections_fill_no_memory() -> None:
    sections = Sections()
    for period in range(12):
        with sections.enter("always", profile_cuda=False), sections.enter(f"{period}", profile_cuda=False):
            pass
        assert sections.summaries().keys() == {"always", f"{period}"}
    assert len(sections._sections) == 9


def test_ever_new_names_fill_no_memory_of_a_report() -> None:
    names, best = Names(), BestOfThisRank()
    for period in range(3):
        values = {f"{period} {number}": 1.0 for number in range(MOST_NAMES // 2 + 1)}
        names.agree(values, Alone(0))
        assert len(names.row(values, missing=-1.0)) == len(names) <= MOST_NAMES
        assert len(best.update(values)) <= MOST_NAMES
    assert names.row({"0 0": 2.0, "nobody has it": 3.0}, missing=-1.0).max() == 2.0


# --- who reports -----------------------------------------------------------------------------------------


def test_a_rank_that_reports_alone_is_named_by_its_own_number() -> None:
    """Rank 0's node must not stand for it."""
    report = ReportGenerator(frozenset(SCORES), True, "n3").generate({"s": summarize([1.0])}, {}, Alone(3))
    assert report is not None
    assert report.rank_to_node == {3: "n3"}
    found = report.identify_stragglers(section_rel_threshold=1.1)
    assert {who.rank for who in found["straggler_sections_relative"]["s"]} == {3}


def test_another_process_group_begins_the_count_anew_and_the_old_one_goes(
    detector: type[Detector], tmp_path: Path
) -> None:
    """As after a restart in the process, which interrupts ranks in different iterations."""

    def meet(name: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / name}", rank=0, world_size=1)

    running = detector._require()
    meet("first")
    group = weakref.ref(dist.group.WORLD)
    for _ in range(5):
        detector.generate_report_if_interval_elapsed()
    assert detector.generate_report() is not None
    assert running.interval._count == 5
    dist.destroy_process_group()
    gc.collect()
    assert group() is None, "the detector does not hold it"
    assert detector.generate_report() is not None
    meet("second")
    try:
        detector.generate_report_if_interval_elapsed()
        assert running.interval._count == 1
        assert detector.generate_report() is not None
    finally:
        detector.shutdown()
        dist.destroy_process_group()


def test_ranks_that_do_not_talk_report_in_the_same_iterations() -> None:
    """Each has lengths of its own; were each to count from report to report they would be apart soon."""
    noise = random.Random(7)
    due = []
    for _ in range(8):
        now = [0.0]
        interval = ReportInterval(60.0, 1, lambda now=now: now[0])
        found = []
        for iteration in range(1, 5001):
            now[0] += noise.uniform(0.2, 0.4)
            if interval.iterate_alone():
                found.append(iteration)
        due.append(found)
    # The first ones are guessed from 16 iterations.
    assert all(iteration % 64 == 0 for found in due for iteration in found)
    settled = [[iteration for iteration in found if iteration > 512] for found in due]
    assert settled == [list(range(768, 5001, 256))] * 8


def test_those_that_choose_another_number_meet_in_every_second_report() -> None:
    due = []
    for length in (0.98, 1.02):
        now = [0.0]
        interval = ReportInterval(2**6.5, 3, lambda now=now: now[0])
        found = []
        for iteration in range(1, 1000):
            now[0] += length
            if interval.iterate_alone():
                found.append(iteration)
        due.append(found)
    assert due == [list(range(128, 1000, 128)), list(range(64, 1000, 64))]


@pytest.mark.parametrize(("interval_s", "at_least"), [(0.001, 7), (1e9, 1), (5.0, 8)])
def test_alone_there_are_no_fewer_iterations_than_are_measured(interval_s: float, at_least: int) -> None:
    now = [0.0]
    interval = ReportInterval(interval_s, at_least, lambda: now[0])
    found = []
    for iteration in range(100):
        now[0] += 1.0 if iteration < 50 else 0.0
        if interval.iterate_alone():
            found.append(iteration + 1)
    assert found == ([] if interval_s > 100 else list(range(24, 101, 8)))


def test_a_fork_measures_for_itself_and_speaks_in_nobody_s_name(
    detector: type[Detector], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        def begin(self, section: str) -> object:
            raise AssertionError("CUDA can't be used in a fork")

        end = summaries = begin

    class Agents:
        def close(self) -> None:
            pass

    running = detector._require()
    running.sections._gpu = running.gpu = Gpu()  # type: ignore[assignment]
    running.agents, running.by_agents = Agents(), True  # type: ignore[assignment]
    child = os.fork()
    if child == 0:
        try:
            with detector.detection_section("worker"):
                pass
            os._exit(0 if sections_of_report() == {"worker"} else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert running.by_agents, "the parent goes on"
    running.agents, running.by_agents, running.gpu = None, False, None
    running.sections.leave_gpu()


class Event:
    """A CUDA event on a GPU that is ``behind``."""

    now, behind = 0.0, False

    def __init__(self, enable_timing: bool) -> None:
        self.at = math.nan

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return not Event.behind

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_a_report_does_not_wait_for_a_gpu_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = EventTimes()
    begun = times.begin("step")
    monkeypatch.setattr(Event, "now", 2.5)
    times.end("step", begun)
    times.end("", times.begin("step"))
    monkeypatch.setattr(Event, "behind", True)
    assert times.summaries() == {}
    monkeypatch.setattr(Event, "behind", False)
    found = times.summaries()["section:step"]
    assert (found[Statistic.NUM], found[Statistic.MED]) == (1, 2500.0)
    assert times.summaries() == {}


# --- callables -------------------------------------------------------------------------------------------


class Model:
    preset = functools.partial(divmod, 7)

    def __init__(self) -> None:
        self.own = lambda: "own"

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    async def fetch(self) -> str:
        await asyncio.sleep(0.02)
        return "fetched"

    def batches(self) -> Iterator[int]:
        yield 1

    @property
    def made_each_time(self) -> Any:
        return lambda: None


class Slotted:
    __slots__ = ("run",)

    def __init__(self) -> None:
        self.run = lambda: "slot"


class OnDemand:
    def __getattr__(self, name: str) -> Any:
        if name == "run":
            return lambda: "made"
        raise AttributeError(name)


def test_each_kind_of_callable_does_what_it_did(detector: type[Detector]) -> None:
    model, slotted, on_demand = Model(), Slotted(), OnDemand()
    other = Model()
    detector.wrap_callables(
        [
            CallableId(model, "made"),
            CallableId(Model, "preset"),
            CallableId(model, "own"),
            CallableId(Model, "fetch"),
            CallableId(slotted, "run"),
            CallableId(on_demand, "run"),
        ]
    )
    assert (model.made(), other.preset(2), model.own(), slotted.run(), on_demand.run()) == (
        *("Model", (3, 1), "own", "slot", "made"),
    )
    assert asyncio.run(other.fetch()) == "fetched"
    report = detector.generate_report()
    assert report is not None
    fetch = f"{__name__}.Model.fetch"
    assert report.local_section_summaries.keys() == {
        *("Model.made", "Model.own", "Slotted.run", "OnDemand.run"),
        *(fetch, f"{__name__}.Model.preset"),
    }
    assert report.section_medians[fetch][0] > 19, "from its first step to its last"
    detector.restore_original_callables()
    assert (model.made(), other.preset(2), model.own(), slotted.run(), on_demand.run()) == (
        *("Model", (3, 1), "own", "slot", "made"),
    )
    assert sections_of_report() == set()
    assert vars(on_demand) == {}
    assert vars(model).keys() == {"own"}


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (CallableId(Model(), "made_each_time"), "Model.made_each_time can't be replaced"),
        (CallableId(list, "append"), "builtins.list.append can't be replaced"),
        (CallableId(torch.nn.Sequential(torch.nn.ReLU()), "0"), "Sequential.0 can't be replaced"),
        (CallableId(Model(), "batches"), "is a generator, which runs bit by bit: put sections into its body"),
        (CallableId(types.SimpleNamespace(kind=Model), "kind"), "is a class: name one of its methods"),
        ("forward", "'forward' is among callable_ids"),
    ],
)
def test_what_cannot_be_timed_is_refused_and_nothing_is_wrapped(
    detector: type[Detector], bad: Any, sentence: str
) -> None:
    model = Model()
    own = model.own
    with pytest.raises(TypeError, match=sentence):
        detector.wrap_callables([CallableId(model, "own"), CallableId(model, "fetch"), bad])
    assert vars(model) == {"own": own}


def test_one_that_is_no_list_is_refused(detector: type[Detector]) -> None:
    with pytest.raises(TypeError, match="a list of them is accepted"):
        detector.wrap_callables(CallableId(Model, "fetch"))  # type: ignore[arg-type]


def test_a_wrapper_that_outlives_the_detector_does_no_harm(detector: type[Detector]) -> None:
    model = Model()
    detector.wrap_callables([CallableId(model, "own")])
    kept = model.own
    detector.shutdown()
    assert (kept(), model.own()) == ("own", "own")
