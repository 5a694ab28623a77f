"""What earlier attempts of the job ended with; kept in the run directory, so it survives a requeue."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.logs.reading import open_log

NAME = "attribution.jsonl"
_MAX_READ = 8 * 2**20


class Advance(str, enum.Enum):
    """How an attempt's progress compares to the one before."""

    ADVANCED = "advanced"
    SAME = "same"
    REGRESSED = "regressed"
    UNKNOWN = "unknown"
    """Never counts as no progress."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One ended cycle, as far as policy cares."""

    ts: float = 0.0
    attempt: int = 0
    cycle: int = 0
    category: str = "unknown"
    fingerprint: str = ""
    entity: str | None = None
    nodes: list[str] = []
    """Suspects: of these, one that is implicated twice may be excluded."""
    last_step: int | None = None
    saved_step: int | None = None
    trained: bool | None = None
    seconds: float | None = None
    action: str = ""
    counted: bool = True
    """It used up the user's budget."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempts before this one say, newest first."""

    same_root_no_advance: int = 0
    same_root_entity_no_advance: int = 0
    no_checkpoint: int = 0
    """Attempts in a row, this one included, without a newer checkpoint; 0 where that is not known."""
    startup_failures: int = 0
    """Attempts in a row, this one included, of one cause that never came to a first step."""
    counted: int = 0
    infra: int = 0
    last_hour: int = 0
    implicated: dict[str, int] = {}
    """How often each of this attempt's suspects was one before."""


def read_history(run_dir: Path) -> list[Attempt]:
    """Return the attempts in order; a line that a crash has torn is skipped.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        with open_log(run_dir / NAME, follow_link=False) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_READ))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    attempts = []
    for line in lines:
        try:
            attempts.append(msgspec.json.decode(line, type=Attempt))
        except msgspec.DecodeError:
            continue
    return attempts


def append_history(run_dir: Path, attempt: Attempt) -> None:
    """Add an attempt, durably, mode 0600.

    Raises:
        OSError: it cannot be written.
    """
    fd = os.open(run_dir / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" * torn + msgspec.json.encode(attempt) + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)


def advance(before: Attempt, after: Attempt) -> Advance:
    """Compare two attempts: by steps, else by checkpoints, else by whether they came to train at all."""
    pairs = ((before.last_step, after.last_step), (before.saved_step, after.saved_step))
    compared = [(b, a) for b, a in pairs if b is not None and a is not None]
    if compared:
        if any(a > b for b, a in compared) and not any(a < b for b, a in compared):
            return Advance.ADVANCED
        return Advance.REGRESSED if any(a < b for b, a in compared) else Advance.SAME
    if before.trained is False:
        return Advance.SAME if after.trained is False else Advance.UNKNOWN
    return Advance.UNKNOWN


def count(history: Sequence[Attempt], now: Attempt) -> Counts:
    """Return what policy asks of the attempts before ``now``."""
    return Counts(
        same_root_no_advance=_same_root(history, now, entity=False),
        same_root_entity_no_advance=_same_root(history, now, entity=True) if now.entity else 0,
        no_checkpoint=_no_checkpoint(history, now),
        startup_failures=_startup(history, now),
        counted=sum(attempt.counted for attempt in history),
        infra=sum(not attempt.counted and attempt.action == "restart_exclude" for attempt in history),
        last_hour=sum(now.ts - 3600 <= attempt.ts for attempt in history if attempt.counted),
        implicated={node: sum(node in attempt.nodes for attempt in history) for node in now.nodes},
    )


def _same_root(history: Sequence[Attempt], now: Attempt, *, entity: bool) -> int:
    found, later = 0, now
    for attempt in reversed(history):
        if attempt.fingerprint != now.fingerprint or (entity and attempt.entity != now.entity):
            break
        if advance(attempt, later) in (Advance.ADVANCED, Advance.UNKNOWN):
            break
        found, later = found + 1, attempt
    return found


def _no_checkpoint(history: Sequence[Attempt], now: Attempt) -> int:
    found = 0
    later = now
    for attempt in reversed(history):
        if later.saved_step is None and later.trained is not False:
            break  # nobody could tell
        if later.saved_step is not None and later.saved_step > (attempt.saved_step or -1):
            break
        found, later = found + 1, attempt
    return found + 1 if found else 0


def _startup(history: Sequence[Attempt], now: Attempt) -> int:
    found = 0
    for attempt in (now, *reversed(history)):
        if attempt.trained is not False or attempt.category != now.category:
            break
        found += 1
    return found
