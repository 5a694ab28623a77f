"""Following a job: what is shown when, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from report_journals import START, Writer, drained, three_faults, write

from nvrx_slurm.journal import JobStarted, Record
from nvrx_slurm.report import JobReport, JobState, Moment
from nvrx_slurm.report.follow import World, follow
from nvrx_slurm.report.source import JournalSource


class Lines:
    """A view that keeps what it was told."""

    redraws = False

    def __init__(self) -> None:
        self.waited = 0
        self.lines: list[str] = []
        self.shown: list[JobState] = []

    def waiting(self) -> None:
        self.waited += 1

    def show(self, report: JobReport, new: tuple[Moment, ...]) -> None:
        self.lines.extend(moment.text for moment in new)
        self.shown.append(report.state)


class Play:
    """A world whose time passes only while somebody waits, and in which a journal is written meanwhile."""

    def __init__(self, path: Path, records: list[Record], slurm: Callable[[float], bool | None]) -> None:
        self.seconds = -1.0
        self.asked: list[float] = []
        self._path = path
        self._records = list(records)
        self._slurm = slurm
        self._bound = 100_000

    def wait(self, seconds: float) -> None:
        self._bound -= 1
        assert self._bound, "follow never ended"
        self.seconds += seconds
        due = [record for record in self._records if record.ts <= START + self.seconds]
        self._records = self._records[len(due) :]
        if due:
            with self._path.open("ab") as file:
                file.write(b"".join(record.to_line() for record in due))

    def in_slurm(self, job: str) -> bool | None:
        self.asked.append(self.seconds)
        return self._slurm(self.seconds)

    @property
    def world(self) -> World:
        return World(now=lambda: START + self.seconds, wait=self.wait, in_slurm=self.in_slurm)


def play(
    tmp_path: Path, records: list[Record], slurm: Callable[[float], bool | None] = lambda seconds: None
) -> tuple[JobReport, Lines, Play]:
    path = tmp_path / "journal.jsonl"
    view, playing = Lines(), Play(path, records, slurm)
    return follow(JournalSource(path), view, playing.world), view, playing


def test_every_event_becomes_one_line_and_the_end_of_the_job_ends_it(tmp_path: Path) -> None:
    report, view, playing = play(tmp_path, three_faults())
    assert report.state is JobState.FINISHED
    assert view.waited == 1
    told = [moment.text for moment in report.timeline]
    assert view.lines[:3] == told[:3]
    assert view.lines[3:6] == [
        "rank 2 on n2: exit 1, seen by child",  # the verdict, two lines on, names rank 3
        "rank 3 on n2: SIGKILL",
        "ranks 0,6 on n[1,4]: exit 1",
    ]
    assert view.lines[6:] == told[5:]
    assert playing.asked == []


def test_what_is_called_a_cascade_later_is_not_told_twice(tmp_path: Path) -> None:
    records = [
        Record(
            ts=record.ts + (0.3 if index > 10 and "SIGKILL" in str(record) else 0.0),
            job=record.job,
            attempt=record.attempt,
            cycle=record.cycle,
            event=record.event,
        )
        for index, record in enumerate(three_faults())
    ]
    records.sort(key=lambda record: record.ts)
    _, view, _ = play(tmp_path, records)
    assert view.lines.count("rank 2 on n2: exit 1, seen by child") == 1
    assert not any(line.startswith("ranks 0,2,6") for line in view.lines)
    assert any(line.startswith("restart: rank 3 on n2 was killed by SIGKILL") for line in view.lines)


def test_a_journal_of_a_job_that_is_over_is_shown_at_once(tmp_path: Path) -> None:
    write(three_faults(), tmp_path / "journal.jsonl")
    report, view, _ = play(tmp_path, [])
    assert report.state is JobState.FINISHED
    assert len(view.shown) == 1


def test_code_75_is_the_end_when_slurm_cannot_be_asked(tmp_path: Path) -> None:
    report, _, playing = play(tmp_path, drained())
    assert report.state is JobState.REQUEUE
    assert playing.seconds < 18.0


def test_code_75_is_followed_into_the_requeue_while_slurm_has_the_job(tmp_path: Path) -> None:
    later = Writer(attempt=1)
    later.cycle = 1
    later.job_started(80.0)
    later.cycle_starts(81.0, ["n1", "n2", "n3", "n4"])
    later.trains(82.0, 83.0, 20)
    end = three_faults()[-1]
    done = Record(ts=START + 90.0, job="4711", attempt=1, cycle=1, event=end.event)
    report, view, playing = play(tmp_path, [*drained(), *later.records, done], lambda seconds: True)
    assert report.state is JobState.FINISHED
    assert len(report.attempts) == 2
    assert view.lines[-1] == "code 0: all 8 ranks exited with 0"
    assert len(playing.asked) <= 14  # every five seconds of 63


def test_code_75_is_the_end_once_slurm_has_forgotten_the_job(tmp_path: Path) -> None:
    report, _, playing = play(tmp_path, drained(), lambda seconds: seconds < 60.0)
    assert (report.state, report.in_slurm) == (JobState.REQUEUE, False)
    assert 60.0 <= playing.seconds < 70.0


def test_a_silent_job_is_followed_on_until_slurm_no_longer_has_it(tmp_path: Path) -> None:
    started = [record for record in three_faults()[:20] if not isinstance(record.event, JobStarted)]
    report, view, playing = play(tmp_path, started, lambda seconds: seconds < 300.0)
    assert report.state is JobState.NO_END
    assert 300.0 <= playing.seconds < 310.0
    assert sum("no end recorded" in line for line in view.lines) == 1
