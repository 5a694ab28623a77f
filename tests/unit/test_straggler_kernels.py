"""The aggregator of kernel records, fed with synthetic ones: numpy knows what it must say."""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.straggler import Detector
from tests.unit.kernel_records import (
    CONCURRENT_KERNEL,
    DISTANCE,
    correlations,
    extension,
    kernels,
    launches,
    others,
)

cupti = extension()
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def aggregate(*batches: Any) -> dict[str, Any]:
    return {kernel.name: kernel for kernel in aggregator(*batches).take()}


def aggregator(*batches: Any) -> Any:
    made = cupti.SyntheticAggregator(DISTANCE)
    for batch in batches:
        made.read(batch)
    return made


def assert_as_numpy(times: Any, durations_ns: Any) -> None:
    us = np.asarray(durations_ns, dtype=np.float64) / 1e3
    assert times.count == len(us)
    assert (times.min_us, times.max_us) == (us.min(), us.max())
    assert times.mean_us == pytest.approx(us.mean(), rel=1e-9)
    assert times.deviation_us == pytest.approx(us.std(), rel=1e-6, abs=1e-6)
    assert not times.coarse
    assert times.median_us == pytest.approx(np.median(us), rel=cupti.RELATIVE_ERROR * 1.0001)


# --- statistics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_statistics_are_those_of_numpy_and_the_median_is_within_1_percent(seed: int) -> None:
    random = np.random.default_rng(seed)
    for durations in (
        random.lognormal(11, 0.05, 20_000),
        random.normal(250_000, 9_000, 999),
        np.concatenate([random.normal(2_000, 20, 501), random.normal(5_000_000, 40_000, 500)]),
        random.choice([1_500, 88_000, 910_000, 3_000_000_000], 1_000),
        np.full(7, 4_242),
    ):
        durations = durations.astype(np.uint64)
        assert_as_numpy(aggregate(kernels("k", durations))["k"].times, durations)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=120))
def test_any_durations_that_fit_are_right(durations: list[int]) -> None:
    times = aggregate(kernels("k", durations))["k"].times
    us = np.sort(np.asarray(durations) / 1e3)
    lower, upper = us[(len(us) - 1) // 2], us[len(us) // 2]
    assert times.median_us == pytest.approx((lower + upper) / 2, rel=0.0101)
    assert times.min_us <= times.median_us <= times.max_us


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["as it comes", "rising", "falling"]))
def test_times_that_scatter_too_far_keep_a_median_of_1_percent_or_say_that_they_do_not(
    seed: int, order: str
) -> None:
    durations = np.exp(np.random.default_rng(seed).uniform(0, 27, 3000)).astype(np.uint64)
    if order != "as it comes":
        durations.sort()
    if order == "falling":
        durations = durations[::-1]
    times = aggregate(kernels("k", durations))["k"].times
    assert times.count == 3000
    us = np.sort(durations / 1e3)
    middle = (us[1499] + us[1500]) / 2
    assert times.coarse or times.median_us == pytest.approx(middle, rel=0.0101)
    if order == "as it comes":
        assert not times.coarse, "only the tails become coarse while the median stays where it is"


def test_a_kernel_takes_at_most_1_kib_and_many_of_them_are_bounded() -> None:
    assert cupti.SKETCH_BYTES <= 1024
    made = cupti.SyntheticAggregator(DISTANCE)
    for index in range(cupti.MOST_SKETCHES + 500):
        made.read(kernels(f"kernel{index}", [1000 + index]))
    found = {kernel.name: kernel.times.count for kernel in made.take()}
    counts = made.counts()
    assert made.sketches() <= cupti.MOST_SKETCHES + 1
    assert found["(other kernels)"] == counts["crowded_out"] == cupti.MOST_SKETCHES + 500 - (len(found) - 1)
    assert sum(found.values()) == counts["kernels"] == cupti.MOST_SKETCHES + 500


def test_kernels_that_are_gone_make_room() -> None:
    made = aggregator(kernels("gone", [1000]), kernels("stays", [1000]))
    for _ in range(12):
        made.take()
        made.read(kernels("stays", [2000]))
    assert made.sketches() == 1
    made.read(kernels("gone", [3000]))
    assert {kernel.name: kernel.times.count for kernel in made.take()} == {"gone": 1, "stays": 1}


def test_a_period_begins_where_the_last_was_taken() -> None:
    made = aggregator(kernels("k", [1000, 2000, 3000]))
    assert made.take()[0].times.count == 3
    assert made.take() == []
    made.read(kernels("k", [9000]))
    (kernel,) = made.take()
    assert_as_numpy(kernel.times, [9000])


def test_an_address_that_has_become_another_name_is_another_kernel() -> None:
    text = ctypes.create_string_buffer(b"first", 16)
    records = kernels("k", [1000])
    records["name"] = ctypes.addressof(text)
    made = aggregator(records)
    text.value = b"second"
    made.read(records)
    assert {kernel.name for kernel in made.take()} == {"first", "second"}


def test_the_hash_is_fnv_1a() -> None:
    # Of the authors' test vectors.
    assert cupti.hash_name("") == 0xCBF29CE484222325
    assert cupti.hash_name("foobar") == 0x85944171F73967E8
    assert aggregate(kernels("foobar", [1000]))["foobar"].hash == 0x85944171F73967E8


# --- records ---------------------------------------------------------------------------------------------


def test_what_is_not_looked_at_is_skipped_and_counted() -> None:
    made = aggregator(
        others(1, 3), kernels("k", [1000]), others(51, 2), others(9999, 1), kernels("k", [2000])
    )
    assert made.take()[0].times.count == 2
    assert made.counts()["unknown"] == 6


def test_kernels_without_times_are_counted_apart() -> None:
    none = kernels("k", [0, 0])
    none["start"] = none["end"] = 0
    backwards = kernels("k", [0])
    backwards["end"] = 10
    nameless = kernels("k", [1000])
    nameless["name"] = 0
    made = aggregator(none, backwards, nameless, kernels("k", [0, 1000]))
    assert made.counts()["untimed"] == 4
    (kernel,) = made.take()
    assert (kernel.times.min_us, kernel.times.count) == (0.0, 2), "as short as the clock can tell is a time"


def test_a_clock_that_passes_its_highest_value_does_not_matter() -> None:
    records = kernels("k", [0])
    records["start"], records["end"] = 2**64 - 400, 600
    assert aggregate(records)["k"].times.min_us == 1.0


def test_half_a_record_at_the_end_of_a_buffer_is_none() -> None:
    raw = kernels("k", [1000, 2000]).view(np.uint8)
    assert aggregate(raw[: DISTANCE + DISTANCE // 2])["k"].times.count == 1
    assert aggregate(raw[:0]) == {}


def test_bad_arguments_are_refused() -> None:
    for distance in (0, 104, 113):
        with pytest.raises(ValueError, match=f"distance is {distance}: multiples of 8 from 112 are accepted"):
            cupti.SyntheticAggregator(distance)
    with pytest.raises(ValueError, match="one after the other"):
        aggregator(kernels("k", [1, 2, 3, 4])[::2])


# --- sections --------------------------------------------------------------------------------------------


def sections_of(kernel: Any) -> dict[int, int]:
    return {section: times.count for section, times in kernel.sections}


@pytest.mark.parametrize("order", ["launches first", "kernels first"])
def test_kernels_belong_to_the_section_of_their_launch_whatever_arrives_first(order: str) -> None:
    numbers = np.arange(1, 20_001)
    told = [correlations(1, numbers[:15_000]), correlations(2, numbers[15_000:])]
    ran = [kernels("k", np.full(20_000, 5000), numbers)]
    made = aggregator(*(told + ran if order == "launches first" else ran + told))
    (kernel,) = made.take()
    assert sections_of(kernel) == {1: 15_000, 2: 5_000}
    assert kernel.times.count == 20_000
    assert made.counts()["unattributed"] == 0


def test_kernels_of_a_graph_share_the_launch() -> None:
    made = aggregator(correlations(3, [77]), kernels("a", [1000] * 50, 77), kernels("b", [2000] * 50, 77))
    assert {kernel.name: sections_of(kernel) for kernel in made.take()} == {"a": {3: 50}, "b": {3: 50}}


def test_what_another_thread_launches_belongs_to_the_section_that_was_open() -> None:
    made = cupti.SyntheticAggregator(DISTANCE)
    outer = made.open(1, 1000)
    inner = made.open(2, 2000)
    made.close(inner, 3000)
    made.read(launches([1500, 2500, 3500, 999], [1, 2, 3, 4]))
    made.close(outer, 4000)
    made.read(launches([4500], [5]))
    made.read(kernels("k", [10_000] * 5, [1, 2, 3, 4, 5]))
    (kernel,) = made.take()
    assert sections_of(kernel) == {1: 2, 2: 1}
    assert made.counts()["unattributed"] == 2


def test_what_the_thread_of_the_section_says_goes_before_the_clock() -> None:
    made = cupti.SyntheticAggregator(DISTANCE)
    made.open(1, 0)
    made.read(correlations(2, [7]))
    made.read(launches([10], [7]))
    made.read(kernels("k", [1000], 7))
    assert sections_of(made.take()[0]) == {2: 1}


def test_the_correlations_of_another_tool_are_none_of_ours() -> None:
    made = aggregator(correlations(9, [7], external_kind=3), kernels("k", [1000], 7))
    assert sections_of(made.take()[0]) == {}
    assert made.counts()["correlations"] == 0


def test_numbers_of_launches_come_round() -> None:
    made = cupti.SyntheticAggregator(DISTANCE)
    numbers = np.arange(2**32 - 500, 2**32 + 500, dtype=np.uint64).astype(np.uint32)
    made.read(correlations(1, numbers))
    made.read(kernels("k", np.full(1000, 1000), numbers))
    assert sections_of(made.take()[0]) == {1: 1000}
    made.take()
    # A round later the same number is another launch, which nobody has told of.
    made.read(kernels("k", [1000], numbers[:1]))
    assert sections_of(made.take()[0]) == {}


def test_the_numbers_of_periods_come_round() -> None:
    made = cupti.SyntheticAggregator(DISTANCE)
    for _ in range(2**16 - 2):
        made.take()
    for number in range(1, 6):
        made.read(correlations(1, [number]))
        made.take()
        made.read(kernels("k", [1000], number))
        assert sections_of(made.take()[0]) == {1: 1}, "told of in the period before"


def test_kernels_whose_launch_is_never_told_of_are_counted_all_the_same() -> None:
    made = aggregator(kernels("k", np.full(400_000, 1000), np.arange(400_000)))
    (kernel,) = made.take()
    assert kernel.times.count == 400_000
    assert made.counts()["unattributed"] == 400_000


def test_a_kernel_waits_one_period_for_its_launch() -> None:
    made = aggregator(kernels("late", [1000], 1), kernels("never", [1000], 2))
    assert made.take(is_last=False) == []
    made.read(correlations(5, [1]))
    found = {kernel.name: sections_of(kernel) for kernel in made.take(is_last=False)}
    assert found == {"late": {5: 1}, "never": {}}
    assert (made.counts()["kernels"], made.counts()["unattributed"]) == (2, 1)


def test_kernels_that_wait_keep_their_names_when_others_go() -> None:
    made = aggregator(kernels("gone", [1000]))
    made.take()
    for _ in range(6):
        made.take(is_last=False)
    made.read(kernels("waits", [1000], 7))
    made.take(is_last=False)
    made.read(correlations(5, [7]))
    assert [(kernel.name, sections_of(kernel)) for kernel in made.take()] == [("waits", {5: 1})]
    assert made.sketches() == 1


def test_a_thousand_sections_within_one_are_told_apart() -> None:
    made = cupti.SyntheticAggregator(DISTANCE)
    outer = made.open(1, 0)
    for index in range(1000):
        made.close(made.open(2, 10 * index + 1), 10 * index + 5)
    made.close(outer, 10_001)
    made.read(launches([9993, 9999, 20_000], [1, 2, 3]))
    made.read(kernels("k", [1000] * 3, [1, 2, 3]))
    found = sections_of(made.take()[0])
    assert found == {2: 1}, "so far back an outer one is not looked for"


# --- buffers ---------------------------------------------------------------------------------------------


def test_buffers_are_read_by_a_thread_of_their_own_and_used_again() -> None:
    collector = cupti.SyntheticCollector(DISTANCE, buffer_bytes=DISTANCE * 10, most_buffers=4)
    for _ in range(50):
        assert collector.feed(kernels("k", np.full(10, 1000))) == 0
        assert collector.drain(60_000)
    assert collector.take()[0].times.count == 500
    assert collector.counts()["buffers"] == 1


def test_beyond_the_limit_buffers_are_refused_and_that_is_counted() -> None:
    collector = cupti.SyntheticCollector(DISTANCE, buffer_bytes=DISTANCE * 2, most_buffers=3)
    given_up = sum(collector.feed(kernels("k", np.full(4000, 1000))) for _ in range(20))
    assert collector.drain(60_000)
    collector.take()
    counts = collector.counts()
    assert counts["buffers"] == 3
    assert counts["buffers_refused"] > 0
    assert counts["kernels"] == 80_000 - given_up, "every record was read or is known to be lost"


def test_buffers_of_somebody_else_are_left_alone() -> None:
    collector = cupti.SyntheticCollector(DISTANCE)
    collector.complete_foreign(kernels("k", [1000]))
    assert collector.drain(60_000)
    counts = collector.counts()
    assert (counts["buffers_foreign"], counts["kernels"]) == (1, 0)


def test_several_threads_hand_over_while_another_takes() -> None:
    collector = cupti.SyntheticCollector(DISTANCE, buffer_bytes=DISTANCE * 64)
    lost: list[int] = []
    taken = 0

    def feed(number: int) -> None:
        lost.append(sum(collector.feed(kernels(f"k{number}", np.full(640, 1000))) for _ in range(50)))

    threads = [threading.Thread(target=feed, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += sum(kernel.times.count for kernel in collector.take())
    assert collector.drain(60_000)
    taken += sum(kernel.times.count for kernel in collector.take())
    assert taken == 3 * 640 * 50 - sum(lost)


def test_a_collector_ends_in_a_fork_too() -> None:
    collector = cupti.SyntheticCollector(DISTANCE)
    child = os.fork()
    if child == 0:
        del collector
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert collector.feed(kernels("k", [1000])) == 0
    assert collector.drain(60_000)


def test_the_benchmark_counts_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = importlib.import_module("straggler")._kernel_rows(200_000)
    found = {row.metric: row.p50 for row in rows}
    assert found["records of all kinds"] > 0
    assert found["memory per kernel and section"] <= 1024


def test_the_gpu_script_runs_the_same_steps_with_and_without_sections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("straggler_gpu")
    monkeypatch.setattr(script, "_BLOCK", 2)
    Detector.initialize()
    try:
        rows = script.overhead(script.Training("cpu", width=64, layers=1, batch=1, length=8), 2)
    finally:
        Detector.shutdown()
    assert {(row.who, row.metric) for row in rows} == {
        ("floor", "step"),
        ("ours", "step"),
        ("ours", "more than without"),
    }


def test_kinds_of_kernel_records_are_the_same_to_it() -> None:
    old, new = kernels("k", [1000]), kernels("k", [3000])
    old["kind"] = 3
    assert new["kind"][0] == CONCURRENT_KERNEL
    assert aggregate(old, new)["k"].times.count == 2
