"""Finding a job's journal, and reading it while it grows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from report_journals import START, Writer, three_faults, write

from nvrx_slurm.report.source import JournalSource, NoSuchRunError, locate


def nowhere(job: str) -> Path | None:
    return None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_dir(path: Path, job: str = "4711") -> Path:
    path.mkdir(parents=True)
    w = Writer(job=job)
    w.job_started(0.0)
    return write(w.records, path / "journal.jsonl")


def find(
    argument: str,
    work_dir: Callable[[str], Path | None] = nowhere,
    must_exist: bool = True,
    **environ: object,
) -> Path:
    return locate(
        argument,
        environ={name: str(value) for name, value in environ.items()},
        work_dir=work_dir,
        must_exist=must_exist,
    )


# --- a directory ---------------------------------------------------------------------------------------


def test_a_run_directory_or_the_journal_itself_is_accepted(here: Path) -> None:
    journal = run_dir(here / "run")
    assert find(str(here / "run")) == journal
    assert find(str(journal)) == journal


def test_a_directory_that_is_missing_or_no_run_directory_is_refused(here: Path) -> None:
    with pytest.raises(
        NoSuchRunError, match=r"there does not exist: give the run directory .* or a Slurm job id"
    ):
        find("there")
    (here / "empty").mkdir()
    with pytest.raises(NoSuchRunError, match=r"empty holds no journal\.jsonl: give the run directory"):
        find("empty")
    with pytest.raises(NoSuchRunError, match="the run is empty: give the run"):
        find("")


def test_following_accepts_a_directory_that_is_still_to_come(here: Path) -> None:
    assert find("later", must_exist=False) == Path("later/journal.jsonl")


# --- a job id ------------------------------------------------------------------------------------------


def test_a_job_is_looked_for_below_the_current_directory(here: Path) -> None:
    run_dir(here / "nvrx/4711")
    assert find("4711") == Path("nvrx/4711/journal.jsonl")


def test_a_job_is_looked_for_where_it_was_submitted(here: Path) -> None:
    journal = run_dir(here / "elsewhere/nvrx/4711")
    assert find("4711", SLURM_SUBMIT_DIR=here / "elsewhere") == journal


def test_the_run_directory_of_the_environment_counts_if_it_is_that_jobs(here: Path) -> None:
    journal = run_dir(here / "mine", job="4711")
    assert find("4711", NVRX_RUN_DIR=here / "mine") == journal
    with pytest.raises(NoSuchRunError):
        find("12", NVRX_RUN_DIR=here / "mine")


def test_slurm_is_asked_for_the_working_directory_last(here: Path) -> None:
    journal = run_dir(here / "work/nvrx/4711")
    asked: list[str] = []

    def work_dir(job: str) -> Path:
        asked.append(job)
        return here / "work"

    assert find("4711", work_dir=work_dir) == journal
    assert asked == ["4711"]
    run_dir(here / "nvrx/4711")
    assert find("4711", work_dir=work_dir) == Path("nvrx/4711/journal.jsonl")
    assert asked == ["4711"]


def test_a_job_that_is_nowhere_is_refused_with_the_places_looked_at(here: Path) -> None:
    with pytest.raises(NoSuchRunError) as refused:
        find("4711", NVRX_RUN_DIR="/r", SLURM_SUBMIT_DIR="/s")
    assert str(refused.value) == (
        "no journal of job 4711 in $NVRX_RUN_DIR (/r), nvrx/4711, /s/nvrx/4711; Slurm does not tell the "
        "job's working directory: give its run directory instead"
    )


def test_following_a_job_waits_where_slurm_says_it_runs(here: Path) -> None:
    found = find("4711", work_dir=lambda job: here, must_exist=False)
    assert found == here / "nvrx/4711/journal.jsonl"


# --- reading -------------------------------------------------------------------------------------------


def test_a_journal_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    source = JournalSource(tmp_path / "journal.jsonl")
    assert not source.update()
    write(three_faults()[:3], source.path)
    assert source.update()
    assert len(source.records) == 3
    assert not source.update()


def test_an_unfinished_last_line_is_left_out_and_reported_until_it_is_whole(tmp_path: Path) -> None:
    lines = [record.to_line() for record in three_faults()[:2]]
    source = JournalSource(tmp_path / "journal.jsonl")
    source.path.write_bytes(lines[0] + lines[1][:20])
    source.update()
    assert (len(source.records), source.read_state.unfinished) == (1, True)
    source.path.write_bytes(b"".join(lines))
    source.update()
    assert (len(source.records), source.read_state.unfinished) == (2, False)
    assert source.read_state.torn == 0


def test_a_torn_line_and_an_unknown_event_are_skipped(tmp_path: Path) -> None:
    lines = [record.to_line() for record in three_faults()[:2]]
    unknown = b'{"v":1,"ts":%f,"job":"4711","attempt":0,"cycle":0,"event":"moon_phase"}\n' % START
    source = JournalSource(tmp_path / "journal.jsonl")
    source.path.write_bytes(lines[0] + lines[1][:20] + b"\n" + unknown + lines[1])
    source.update()
    assert len(source.records) == 2
    assert (source.read_state.torn, source.read_state.unknown) == (1, 1)
