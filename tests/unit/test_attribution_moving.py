"""Traces that were not taken at one moment, of a job that was slow: they show nobody to be stuck."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvrx_slurm.attribution.attribute import conclude
from nvrx_slurm.attribution.culprits import SUSPICION
from nvrx_slurm.attribution.evidence import CycleEvidence, ProcessFault
from nvrx_slurm.attribution.flight_recorder import CulpritClass, Dumps, FlightReport, Place, analyze
from nvrx_slurm.attribution.flight_recorder.trace import RankTrace, reduce_dump
from nvrx_slurm.attribution.logs.rules import Exclude, load_rules

BEGAN = 1796139920.0
PLACES = {0: Place("n2", 0), 1: Place("n2", 1), 2: Place("n3", 0), 3: Place("n3", 1)}


def gloo(rank: int, taken: float, *launched: float, retired: int) -> RankTrace:
    """As torch 2.13 writes the trace of gloo's default group, and the agent its manifest.

    Args:
        taken: when, in seconds since ``BEGAN``.
        launched: when the rank called its first, second, third all-reduce.
        retired: how many of them have ended.
    """
    entries: list[dict[str, Any]] = [
        {
            "collective_seq_id": number,
            "input_dtypes": ["Float"],
            "input_sizes": [[1]],
            "is_p2p": False,
            "op_id": number,
            "output_dtypes": ["Float"],
            "output_sizes": [[1]],
            "p2p_seq_id": 0,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "record_id": number - 1,
            "retired": number <= retired,
            "state": "scheduled",
            "time_created_ns": int((BEGAN + at) * 1e9),
            "time_discovered_completed_ns": 0,
            "time_discovered_started_ns": 0,
            "timeout_ms": 1800000,
        }
        for number, at in enumerate(launched, 1)
    ]
    status = {
        "last_completed_collective": str(retired),
        "last_enqueued_collective": str(len(launched)),
        "last_started_collective": "-1",
    }
    config = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2, 3]"}}
    dump = {"version": "2.10", "pg_config": config, "pg_status": {"0": status}, "entries": entries}
    trace = reduce_dump(rank, dump)
    trace.written_at = BEGAN + taken
    return trace


def report_of(*traces: RankTrace) -> FlightReport:
    return analyze(Dumps({trace.rank: trace for trace in traces}), world_size=4, places=PLACES)


def test_of_the_real_hang_the_rank_that_never_called_is_named() -> None:
    """Rank 1 never comes to the third all-reduce; the heartbeats' time-out is 5 s."""
    report = report_of(
        gloo(0, 5.970, 0.891, 0.907, 0.957, retired=2),
        gloo(1, 5.970, 0.895, 0.907, retired=2),
        gloo(2, 5.966, 0.894, 0.917, 0.958, retired=2),
        gloo(3, 5.966, 0.885, 0.908, 0.958, retired=2),
    )
    assert {c.rank: c.kind for c in report.culprits} == {1: CulpritClass.HOST_LAG}
    assert not report.moving


# The second all-reduce took nearly the whole time-out, for rank 3 came late to it under load. Node n2's
# traces were taken when rank 0 had given no sign of life for 5 s, and n3's 0.3 s later: the job had gone on.
SLOW = (
    gloo(0, 5.930, 0.891, 0.907, retired=2),
    gloo(1, 5.930, 0.895, 0.907, retired=2),
    gloo(2, 6.230, 0.894, 0.917, 5.940, retired=2),
    gloo(3, 6.230, 0.885, 5.915, 5.941, retired=2),
)
SLOWER = (
    gloo(0, 5.910, 0.891, 0.907, retired=1),
    gloo(1, 5.910, 0.895, 0.907, retired=1),
    *SLOW[2:],
)
"""n2's a little earlier still: there the second has not ended."""


def test_ranks_that_others_have_just_left_behind_are_not_blamed() -> None:
    for traces in (SLOW, SLOWER):
        report = report_of(*traces)
        assert (report.culprits, report.victims) == ((), (0, 1))
        assert "slow rather than stuck" in report.moving
        assert not report.conclusive
    # Nor if a trace is missing, of those that lag or of the others.
    for missing in range(4):
        assert not report_of(*(trace for trace in SLOW if trace.rank != missing)).conclusive


def test_of_a_job_that_was_slow_the_launchers_word_stays_a_suspicion() -> None:
    fault = ProcessFault(ts=BEGAN + 5.93, rank=0, node="n2", hung=True, detail="no heartbeat for 5 s")
    evidence = CycleEvidence(job="1", attempt=0, cycle=4, world_size=4, places=PLACES, faults=(fault,))
    said = conclude(evidence, load_rules(), [], report_of(*SLOW), now=BEGAN)
    assert said.family.id == "job.hang"
    assert said.confidence <= SUSPICION
    assert all(c.confidence <= SUSPICION and not c.by_traces for c in said.culprits)
    assert {c.exclude for c in said.culprits} <= {Exclude.NO}
    assert said.decision.exclude == ()


def test_who_has_waited_for_seconds_by_its_own_clock_is_believed_whatever_the_others_clock_says() -> None:
    """n2's clock is ten seconds behind, so its traces seem to be older than what they lack."""
    report = report_of(
        gloo(0, -4.030, -9.1, -9.09, -9.04, retired=2),
        gloo(1, -4.030, -9.1, -9.09, retired=2),
        gloo(2, 5.966, 0.894, 0.917, 0.958, retired=2),
        gloo(3, 5.966, 0.885, 0.908, 0.958, retired=2),
    )
    assert [c.rank for c in report.culprits] == [1]


@example(
    0, [0.0, 0.5, 0.44484965859785824, 0.0], 0.44484965859785824, 3.0, False, [False, False, True, False]
)
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.floats(0.0, 0.6), min_size=4, max_size=4),
    st.floats(0.01, 0.5),
    st.floats(2.5, 20.0),
    st.booleans(),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_whoever_is_dumped_first_is_not_blamed_and_whoever_hangs_is(
    rank: int, later: list[float], step_s: float, waited: float, hangs: bool, busy: list[bool]
) -> None:
    """Four ranks call an all-reduce each step; traces are taken within 0.6 s; one hangs, or none does."""
    begun = [step_s * n for n in range(1, 9)]
    end = begun[-1] + waited if hangs else begun[-1]
    traces = []
    for one in range(4):
        taken = end + later[one]
        if hangs:
            launched = begun[:-1] if one == rank else begun
            ended = 7
        else:
            launched = [step_s * n for n in range(1, 1 + int(taken / step_s + 1e-9))]
            # Nobody is late, so an operation lasts for a moment only.
            ended = len(launched) - (busy[one] and taken - launched[-1] < 0.1)
        traces.append(gloo(one, taken, *launched, retired=ended))
    report = report_of(*traces)
    found = [culprit.rank for culprit in report.culprits if not culprit.is_suspicion]
    assert found == ([rank] if hangs else []), report


def test_a_hang_is_found_with_a_short_time_out_too() -> None:
    report = report_of(
        gloo(0, 1.460, 0.891, 0.907, 0.957, retired=2),
        gloo(1, 1.460, 0.895, 0.907, retired=2),
        gloo(2, 1.560, 0.894, 0.917, 0.958, retired=2),
        gloo(3, 1.560, 0.885, 0.908, 0.958, retired=2),
    )
    assert [c.rank for c in report.culprits] == [1]
