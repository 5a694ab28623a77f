"""Calculated time-outs: the meter against a plain reference, the formulas, the saved form."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.fault_tolerance.timeouts import (
    IntervalMeter,
    Maxima,
    NotEnoughDataError,
    calculate_heartbeat,
    calculate_sections,
)
from nvrx_slurm.wire.timeouts import (
    HeartbeatTimeouts,
    Monitoring,
    SectionTimeouts,
    check_section_names,
    to_state,
    with_state,
)

NAMES = ["setup", "step", "checkpoint"]
seconds = st.floats(min_value=1e-3, max_value=1e6)

Happening = tuple[int, str, int]
"""Nanoseconds since the one before; beat, open or close; section."""
happenings = st.lists(
    st.tuples(
        st.integers(min_value=1, max_value=10**12),
        st.sampled_from(["beat", "toggle"]),
        st.integers(min_value=0, max_value=len(NAMES) - 1),
    ),
    max_size=40,
)


def reference(events: list[Happening], start: int, end: int) -> Maxima:
    """The definitions, from a list of all intervals."""
    beats, opened = [], {}
    durations: dict[int, list[int]] = {i: [] for i in range(len(NAMES))}
    outside, out_since, now = [], start, start
    for gap, what, section in events:
        now += gap
        if what == "beat":
            beats.append(now)
        elif section in opened:
            durations[section].append(now - opened.pop(section))
            if not opened:
                out_since = now
        else:
            if not opened:
                outside.append(now - out_since)
            opened[section] = now
    if not opened:
        outside.append(end - out_since)

    def longest(intervals: list[int]) -> float:
        return max(intervals) / 1e9 if intervals and max(intervals) > 0 else -1.0

    return Maxima(
        initial=longest([beats[0] - start] if beats else []),
        subsequent=longest([b - a for a, b in itertools.pairwise(beats)]),
        out_of_section=longest(outside),
        sections=tuple(longest(durations[i]) for i in range(len(NAMES))),
    )


@given(events=happenings, tail=st.integers(min_value=1, max_value=10**12))
def test_the_meter_finds_the_longest_of_all_intervals(events: list[Happening], tail: int) -> None:
    start = now = 5_000_000_000
    meter = IntervalMeter(len(NAMES), start)
    for gap, what, section in events:
        now += gap
        if what == "beat":
            meter.heartbeat(now)
        elif meter.is_open(section):
            meter.close(section, now)
        else:
            meter.open(section, now)
    assert meter.maxima(now + tail) == reference(events, start, now + tail)


def test_opening_and_closing_tell_whether_any_other_section_is_open() -> None:
    meter = IntervalMeter(3, 1)
    assert meter.open(0, 2)
    assert not meter.open(1, 3)
    assert not meter.close(0, 4)
    assert meter.close(1, 5)


@given(initial=seconds, subsequent=seconds, factor=st.floats(min_value=1, max_value=100))
def test_a_first_calculation_replaces_what_was_configured(
    initial: float, subsequent: float, factor: float
) -> None:
    merged = Maxima(initial, subsequent, -1, ())
    new = calculate_heartbeat(merged, HeartbeatTimeouts(initial=1.0, subsequent=None), factor)
    assert new == HeartbeatTimeouts(
        initial=factor * initial, subsequent=factor * subsequent, were_calculated=True
    )


@given(initial=seconds, subsequent=seconds, old=seconds)
def test_a_later_calculation_is_the_mean_of_new_and_current(
    initial: float, subsequent: float, old: float
) -> None:
    current = HeartbeatTimeouts(initial=old, subsequent=old, were_calculated=True)
    new = calculate_heartbeat(Maxima(initial, subsequent, -1, ()), current, 5.0)
    assert new.initial is not None
    assert new.subsequent is not None
    assert math.isclose(new.initial, 0.5 * 5 * initial + 0.5 * old)
    assert math.isclose(new.subsequent, 0.5 * 5 * subsequent + 0.5 * old)


def test_only_the_selected_sections_change_and_only_calculated_values_are_averaged() -> None:
    current = SectionTimeouts(
        section={"setup": 100.0, "step": 10.0, "checkpoint": None},
        out_of_section=50.0,
        calculated_sections=["step"],
    )
    new = calculate_sections(Maxima(-1, -1, 4, (7, 1, 2)), current, 3.0, ["step", "checkpoint"])
    assert new == SectionTimeouts(
        section={"setup": 100.0, "step": 6.5, "checkpoint": 6.0},
        out_of_section=12.0,
        calculated_sections=["checkpoint", "step"],
        is_out_of_section_calculated=True,
    )


def test_the_time_out_outside_of_sections_can_be_calculated_alone_or_left_alone() -> None:
    current = SectionTimeouts(section={"step": 10.0}, out_of_section=50.0)
    merged = Maxima(-1, -1, 4, (2,))
    alone = calculate_sections(merged, current, 5.0, [], out_of_section=True)
    assert (alone.section, alone.out_of_section) == ({"step": 10.0}, 20.0)
    left = calculate_sections(merged, current, 5.0, None, out_of_section=False)
    assert (left.section, left.out_of_section) == ({"step": 10.0}, 50.0)
    assert not left.is_out_of_section_calculated


@pytest.mark.parametrize(
    ("merged", "selected", "outside", "what"),
    [
        (Maxima(-1, -1, 4, (-1,)), None, True, "'step'"),
        (Maxima(-1, -1, -1, (2,)), None, True, "outside of all"),
    ],
)
def test_what_no_rank_has_measured_cannot_be_calculated(
    merged: Maxima, selected: list[str] | None, outside: bool, what: str
) -> None:
    with pytest.raises(NotEnoughDataError, match=what):
        calculate_sections(merged, SectionTimeouts(section={"step": 1.0}), 5.0, selected, outside)
    with pytest.raises(NotEnoughDataError, match="two heartbeats"):
        calculate_heartbeat(merged, HeartbeatTimeouts(), 5.0)


def test_an_unknown_section_cannot_be_selected() -> None:
    with pytest.raises(ValueError, match="'stpe' is not monitored; monitored: step"):
        calculate_sections(Maxima(-1, -1, 1, (1,)), SectionTimeouts(section={"step": 1.0}), 5.0, ["stpe"])


maxima = st.builds(
    Maxima, seconds, seconds, seconds, st.tuples(*(st.one_of(seconds, st.just(-1.0)) for _ in NAMES))
)


@given(ranks=st.lists(maxima, min_size=1, max_size=5))
def test_merging_over_ranks_keeps_the_largest_of_each(ranks: list[Maxima]) -> None:
    merged = Maxima.from_list([max(column) for column in zip(*(r.to_list() for r in ranks), strict=True)])
    for rank in ranks:
        assert all(m >= r for m, r in zip(merged.to_list(), rank.to_list(), strict=True))


MONITORING = Monitoring(
    heartbeat=HeartbeatTimeouts(initial=60.0, subsequent=30.0),
    section=SectionTimeouts(section={"setup": 100.0, "step": None}, out_of_section=50.0),
)


def test_only_calculated_values_are_saved_and_loading_gives_them_back() -> None:
    assert to_state(MONITORING.heartbeat, MONITORING.section) == {"current_timeouts": {}}
    section = SectionTimeouts(
        section={"setup": 100.0, "step": 4.0}, out_of_section=50.0, calculated_sections=["step"]
    )
    heartbeat = HeartbeatTimeouts(initial=6.0, subsequent=3.0, were_calculated=True)
    state = json.loads(json.dumps(to_state(heartbeat, section)))
    assert state == {
        "current_timeouts": {
            "heartbeat": {"initial": 6.0, "subsequent": 3.0, "were_calculated": True},
            "section": {
                "section": {"step": 4.0},
                "out_of_section": None,
                "calculated_sections": ["step"],
                "is_out_of_section_calculated": False,
            },
        }
    }
    loaded = with_state(MONITORING, state)
    assert (loaded.heartbeat, loaded.section) == (heartbeat, section)


def test_a_saved_section_that_is_not_monitored_any_more_is_left_out() -> None:
    other = SectionTimeouts(section={"eval": 3.0}, calculated_sections=["eval"])
    assert with_state(MONITORING, to_state(HeartbeatTimeouts(), other)) == MONITORING


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"current_timeouts": 3},
        {"current_timeouts": {"heartbeat": {"initial": -1, "subsequent": 1, "were_calculated": True}}},
        {"current_timeouts": {"heartbeat": {"initial": 1, "were_calculated": True}}},
        {"current_timeouts": {"heartbeat": {"initial": "1", "subsequent": 1, "were_calculated": True}}},
        {"current_timeouts": {"section": {"section": {}, "calculated_sections": ["step"]}}},
        {
            "current_timeouts": {
                "section": {"section": {"step": float("nan")}, "calculated_sections": ["step"]}
            }
        },
        {"current_timeouts": {"section": {"is_out_of_section_calculated": True}}},
    ],
)
def test_what_was_not_saved_by_us_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not saved time-outs"):
        with_state(MONITORING, state)


@pytest.mark.parametrize(
    ("names", "what"),
    [([f"s{i}" for i in range(65)], "65 sections"), ([""], "''"), (["x" * 65], "64 bytes"), (["a\nb"], "a")],
)
def test_sections_that_do_not_fit_a_page_are_refused(names: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check_section_names(names)
