"""What earlier attempts of the job leave to this one, read from their journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm import journal
from nvrx_slurm.coordinator.blame import may_be_the_nodes
from nvrx_slurm.coordinator.progress import Progress, Signs, highest
from nvrx_slurm.journal import Record, iterate_journal

FRUITLESS_ATTEMPTS = 3
"""So many in a row that never came to a step, and the job is not requeued again."""
LONG_ENOUGH_S = 300.0
"""A cycle of a program that tells nothing of itself is taken to have trained when it ran for so long."""
_RESTART_ELSEWHERE = 75


@dataclass
class Fruits:
    """Whether one attempt was of use."""

    trained: bool = False
    """A rank came to a step."""
    longest_s: float = 0.0
    """Of its cycles."""
    asked_to_end: bool = False
    """Its time was nearly over, or somebody asked the ranks to save and end."""
    preempted: bool = False

    def fruitless(self, monitored: bool) -> bool:
        """Tell whether the same once more would be of no use; ``monitored``: its ranks use the client."""
        if self.trained or self.preempted:
            return False
        return monitored or (self.longest_s < LONG_ENOUGH_S and not self.asked_to_end)


@dataclass(frozen=True)
class Past:
    """The state at the end of the attempt before; that of a new job by default."""

    progress: Progress = field(default_factory=Progress)
    faults: Mapping[str, int] = field(default_factory=dict)
    """Of each node, of its own; see :mod:`nvrx_slurm.coordinator.suspects`."""
    fruitless: int = 0
    """Attempts in a row that never came to a step."""


def read_past(records: Iterable[Record], job_id: str, attempt: int, argv: Sequence[str]) -> Past:
    """Return what is left by the attempts that this one goes on from.

    A run directory may hold other jobs, and a batch script may train one program after another: what was
    done with another program, or came to an end of its own, is no past of this one.
    """
    replay = _Replay()
    for record in records:
        if record.job == job_id and record.attempt <= attempt:
            replay.take(record)
    return replay.past(argv)


def past_of_job(path: Path, job_id: str, attempt: int, argv: Sequence[str]) -> Past:
    """Return :func:`read_past` of the journal at ``path``, which need not exist.

    Raises:
        JournalVersionError: the journal was written by a newer version.
    """
    try:
        return read_past(iterate_journal(path), job_id, attempt, argv)
    except FileNotFoundError:
        return Past()


@dataclass
class _Replay:
    _argv: list[str] = field(default_factory=list)
    _attempt: int = -1
    _code: int | None = None
    _progress: Progress = field(default_factory=Progress)
    _faults: Counter[str] = field(default_factory=Counter)
    _fruitless: int = 0
    _fruits: Fruits = field(default_factory=Fruits)
    _signs: Signs | None = None
    """Of the running cycle; None: it has been scored, or there is none."""
    _began: float | None = None
    _seen: list[journal.FaultDetected] = field(default_factory=list)
    _verdicts: dict[int, journal.Verdict] = field(default_factory=dict)

    def past(self, argv: Sequence[str]) -> Past:
        if self._attempt < 0 or not self._goes_on(argv):
            return Past()
        self._end_attempt()
        return Past(self._progress, dict(self._faults), self._fruitless)

    def _goes_on(self, argv: Sequence[str]) -> bool:
        return list(argv) == self._argv and self._code in (None, _RESTART_ELSEWHERE)

    def take(self, record: Record) -> None:
        match record.event:
            case journal.JobStarted() as event:
                self._begin_attempt(record.attempt, event.argv)
            case journal.CycleStarted():
                self._end_cycle()
                self._signs, self._began, self._seen = Signs(), record.ts, []
            case journal.WorkersStopped():
                self._measure(record.ts)
            case journal.CycleScored() as event:
                self._progress.take_score(event)
            case journal.StopRequested() as event:
                self._fruits.asked_to_end = True
                self._fruits.preempted |= event.preempted
            case journal.JobEnded(code=code):
                self._measure(record.ts)
                self._code = code
            case journal.FaultDetected() as event:
                self._seen.append(event)
            case journal.Verdict() as event:
                self._blame(event)
                self._verdicts[record.cycle] = event
            case journal.CycleAttributed() as event:
                self._correct(self._verdicts.pop(record.cycle, None), event)
            case event:
                self._take_sign(event)

    def _take_sign(self, event: journal.events.AnyEvent) -> None:
        signs = self._signs
        if signs is None:
            return
        match event:
            case journal.RankReady():
                signs.monitored = True
            case journal.FirstStep(step=step):
                signs.heartbeat = True
                signs.step = highest(signs.step, step)
            case journal.Progress(step=step):
                signs.step = highest(signs.step, step)
            case journal.CheckpointSaved(step=step):
                signs.saved = highest(signs.saved, step)
            case journal.CheckpointLoaded(step=step):
                signs.loaded = highest(signs.loaded, step)
            case _:
                pass

    def _begin_attempt(self, attempt: int, argv: list[str]) -> None:
        if self._attempt >= 0:
            if attempt >= self._attempt and self._goes_on(argv):
                self._end_attempt()
            else:
                self._progress, self._faults, self._fruitless = Progress(), Counter(), 0
                self._verdicts.clear()
        self._attempt, self._argv, self._code = attempt, argv, None
        self._fruits, self._signs, self._began, self._seen = Fruits(), None, None, []

    def _end_cycle(self) -> None:
        if self._signs is not None:
            self._fruits.trained |= self._signs.trained
            self._progress.close(self._signs)
        self._signs = None

    def _end_attempt(self) -> None:
        self._end_cycle()
        if self._fruits.trained:
            self._fruitless = 0
        elif self._fruits.fruitless(self._progress.monitored):
            self._fruitless += 1

    def _measure(self, ts: float) -> None:
        if self._began is not None:
            self._fruits.longest_s = max(self._fruits.longest_s, ts - self._began)
            self._began = None

    def _blame(self, verdict: journal.Verdict) -> None:
        for fault in self._seen:
            same = (fault.node, fault.rank, fault.kind) == (verdict.node, verdict.rank, verdict.kind)
            if same and verdict.node is not None and may_be_the_nodes(fault):
                self._faults[verdict.node] += 1
                return

    def _correct(self, verdict: journal.Verdict | None, found: journal.CycleAttributed) -> None:
        """Count a hang for the node of the rank that traces show to be its cause."""
        node = hung_node(found)
        if verdict is None or verdict.kind is not journal.FaultKind.HANG or verdict.node in (None, node):
            return
        if node is not None and self._faults[verdict.node] > 0:
            self._faults[verdict.node] -= 1
            self._faults[node] += 1


def hung_node(found: journal.CycleAttributed) -> str | None:
    """Return the node of the rank that all others wait for, as traces show; None: they show none."""
    return next((c.node for c in found.culprits if c.by_traces and c.rank is not None), None)
