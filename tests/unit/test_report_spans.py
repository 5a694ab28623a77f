"""The share of time spent training: the formula of docs/report.md."""

from __future__ import annotations

import pytest
from report_journals import START, Writer, killed, requeued, three_faults

from nvrx_slurm.journal import CheckpointSaved, JobEnded, Progress
from nvrx_slurm.report import Phase, TimeShare, build_report
from nvrx_slurm.report.bar import bar, marks
from nvrx_slurm.report.model import Span

NODES = ["n1", "n2", "n3", "n4"]


def time_of(writer: Writer, now: float = 1e6) -> TimeShare:
    time = build_report(writer.records, START + now).time
    assert time is not None
    return time


def restarted(resumed: int, progress: list[tuple[float, int]], end: float) -> Writer:
    """Steps 1 to 10 at 11 s to 20 s, a fault at 21 s, training again at 25 s from ``resumed``."""
    w = Writer()
    w.job_started(0.0)
    w.cycle_starts(5.0, NODES)
    w.trains(10.0, 11.0, None)
    w.steps(11.0, 1, 10, 1.0)
    w.at(21.0, killed(3, "n2"))
    w.restart(22.0, "r", "w", killed(3, "n2"))
    w.cycle_starts(23.0, NODES)
    w.trains(24.0, 25.0, resumed)
    for at, step in progress:
        w.at(at, Progress(step=step))
    w.at(end, JobEnded(code=0, why="done"))
    return w


def test_every_second_of_an_undisturbed_job_is_starting_or_training() -> None:
    w = Writer()
    w.job_started(0.0)
    w.cycle_starts(5.0, NODES)
    w.trains(10.0, 12.0, None)
    w.at(20.0, JobEnded(code=0, why="done"))
    time = time_of(w)
    assert time.wall_s == pytest.approx(20.0)
    assert time.share(Phase.STARTING) == pytest.approx(0.6)
    assert time.share(Phase.TRAINING) == pytest.approx(0.4)
    assert time.redone_known


def test_steps_done_again_are_not_training() -> None:
    # resumed at 4 with the first step (5) at 25 s; step 10 is passed at 30 s
    w = restarted(4, [(25.0 + n, 5 + n) for n in range(1, 16)], 41.0)
    time = time_of(w)
    assert time.seconds[Phase.REDOING] == pytest.approx(5.0)
    assert time.seconds[Phase.TRAINING] == pytest.approx(10.0 + 11.0)
    assert time.seconds[Phase.RECOVERING] == pytest.approx(4.0)
    assert time.seconds[Phase.STARTING] == pytest.approx(11.0)
    assert time.redone_known


def test_between_two_step_reports_the_repeated_part_is_interpolated() -> None:
    w = restarted(4, [(35.0, 15)], 36.0)  # step 5 at 25 s, 15 at 35 s: 10 at 30 s
    assert time_of(w).seconds[Phase.REDOING] == pytest.approx(5.0)


def test_a_cycle_that_never_comes_back_to_where_it_was_only_does_steps_again() -> None:
    w = restarted(4, [(26.0, 6), (27.0, 7)], 28.0)
    assert time_of(w).seconds[Phase.REDOING] == pytest.approx(3.0)


def test_a_cycle_that_tells_no_step_is_not_guessed_at() -> None:
    time = time_of(restarted(4, [], 40.0))
    assert time.seconds[Phase.REDOING] == 0.0
    assert not time.redone_known


def test_a_cycle_that_resumes_where_the_last_one_was_repeats_nothing() -> None:
    time = time_of(restarted(10, [], 40.0))
    assert time.seconds[Phase.REDOING] == 0.0
    assert time.redone_known


def test_a_checkpoint_that_is_saved_late_is_no_step_back() -> None:
    w = Writer()
    w.job_started(0.0)
    w.cycle_starts(5.0, NODES)
    w.trains(10.0, 11.0, None)
    w.steps(11.0, 1, 10, 1.0, save_every=100)
    w.at(20.5, CheckpointSaved(step=5, layer="shared", rank=0))
    w.at(21.0, Progress(step=11))
    w.at(22.0, JobEnded(code=0, why="done"))
    assert time_of(w).seconds[Phase.REDOING] == 0.0


def test_time_between_attempts_is_apart() -> None:
    time = build_report(requeued(), START + 1e6).time
    assert time is not None
    assert time.seconds[Phase.QUEUED] == pytest.approx(61.0)
    assert time.seconds[Phase.STOPPING] == pytest.approx(0.4)
    assert time.seconds[Phase.RECOVERING] == pytest.approx(109.0 - 104.9)


def test_the_time_a_cycle_trained_is_the_sum_of_its_spans() -> None:
    report = build_report(three_faults(), START + 1e6)
    assert report.time is not None
    assert sum(cycle.trained_s for cycle in report.cycles) == pytest.approx(
        report.time.seconds[Phase.TRAINING]
    )
    assert [cycle.redone_s for cycle in report.cycles] == pytest.approx([0.0, 3.0, 0.4, 3.5], abs=1e-6)


# --- the bar -------------------------------------------------------------------------------------------

SPANS = (
    Span(Phase.STARTING, 0.0, 10.0, None),
    Span(Phase.TRAINING, 10.0, 40.0, 0),
    Span(Phase.RECOVERING, 40.0, 42.0, None),
    Span(Phase.TRAINING, 42.0, 50.0, 1),
)


def test_each_piece_of_the_bar_shows_what_filled_most_of_it() -> None:
    s, t, r = Phase.STARTING, Phase.TRAINING, Phase.RECOVERING
    assert bar(SPANS, 5) == (s, t, t, t, t)
    assert bar(SPANS, 25) == (*[s] * 5, *[t] * 15, r, *[t] * 4)


def test_every_fault_has_a_mark_and_a_number_where_there_is_room() -> None:
    assert marks([(0.0, 0), (5.0, 1)], 0.0, 10.0, 20) == "^0        ^1"
    assert marks([(0.0, 10), (1.0, 11), (9.9, 12)], 0.0, 10.0, 20) == "^ ^11              ^"
    assert marks([(3.0, 0), (3.0, 1)], 0.0, 10.0, 20) == "      ^0"
    assert marks([], 0.0, 10.0, 20) == ""
