"""Where a report's journal is, and how it is read: whole, or again and again while it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nvrx_slurm.journal import JournalFollower, Record
from nvrx_slurm.report.model import ReadState

JOURNAL_NAME = "journal.jsonl"


class NoSuchRunError(ValueError):
    """What was asked for is no run directory; the message says what was looked for, and where."""


class JournalSource:
    """The records of a journal so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._follower = JournalFollower(path)
        self._unfinished = False

    def update(self) -> bool:
        """Read what was added; return whether there was any. A journal that does not exist yet is empty.

        Raises:
            OSError: the file cannot be read.
            JournalError: the journal was written by a newer version.
        """
        before = len(self.records)
        try:
            self.records.extend(self._follower.read())
            self._unfinished = _ends_in_mid_line(self.path)
        except FileNotFoundError:
            return False
        return len(self.records) > before

    @property
    def read_state(self) -> ReadState:
        """What was met besides events."""
        return ReadState(
            torn=self._follower.torn, unfinished=self._unfinished, unknown=self._follower.unknown
        )


def _ends_in_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def locate(
    argument: str,
    *,
    environ: Mapping[str, str],
    work_dir: Callable[[str], Path | None],
    must_exist: bool = True,
) -> Path:
    """Return the path of the journal that ``argument`` means.

    Args:
        argument: a run directory, a journal, or a job id (digits only).
        environ: ``NVRX_RUN_DIR`` and ``SLURM_SUBMIT_DIR`` are read.
        work_dir: asks Slurm for a job's working directory; None when it does not know.
        must_exist: False accepts a place where the journal is still to come.

    Raises:
        NoSuchRunError
    """
    if argument.isdecimal() and not Path(argument, JOURNAL_NAME).is_file():
        return _of_job(argument, environ, work_dir, must_exist=must_exist)
    if not argument:
        raise NoSuchRunError("the run is empty: give the run directory of an nvrx-srun job or a Slurm job id")
    path = Path(argument)
    if path.is_file():
        return path
    journal = path / JOURNAL_NAME
    if must_exist and not path.is_dir():
        raise NoSuchRunError(
            f"{path} does not exist: give the run directory of an nvrx-srun job (the one that holds "
            f"{JOURNAL_NAME}) or a Slurm job id; --follow waits for one that is still to come"
        )
    if must_exist and not journal.is_file():
        raise NoSuchRunError(
            f"{path} holds no {JOURNAL_NAME}: give the run directory of an nvrx-srun job or a Slurm job id"
        )
    return journal


def _of_job(
    job: str, environ: Mapping[str, str], work_dir: Callable[[str], Path | None], *, must_exist: bool
) -> Path:
    looked = []
    named = environ.get("NVRX_RUN_DIR")
    if named:
        journal = Path(named, JOURNAL_NAME)
        looked.append(f"$NVRX_RUN_DIR ({named})")
        if journal.is_file() and _is_of_job(journal, job):
            return journal
    places = [Path("nvrx", job)]
    submitted = environ.get("SLURM_SUBMIT_DIR")
    if submitted:
        places.append(Path(submitted, "nvrx", job))
    for place in places:
        looked.append(str(place))
        if (place / JOURNAL_NAME).is_file():
            return place / JOURNAL_NAME
    directory = work_dir(job)
    if directory is not None:
        journal = directory / "nvrx" / job / JOURNAL_NAME
        looked.append(str(journal.parent))
        if journal.is_file() or not must_exist:
            return journal
    asked = "" if directory is not None else "; Slurm does not tell the job's working directory"
    raise NoSuchRunError(
        f"no journal of job {job} in {', '.join(looked)}{asked}: give its run directory instead"
    )


def _is_of_job(journal: Path, job: str) -> bool:
    """Tell whether the journal's first record names ``job``; $NVRX_RUN_DIR may be another job's."""
    record = next(iter(JournalFollower(journal).read()), None)
    return record is None or record.job == job
