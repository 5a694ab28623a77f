"""The cases: which fault meets which ranks, and what is measured."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 4
SOFT_S, HARD_S = 3.0, 5.0
"""Time-outs of the cases with a hang; all others have the defaults, as everything else has."""


@dataclass(frozen=True)
class Plan:
    """What the ranks of one job do; see worker.py."""

    fault: str
    victim: int = 1
    """Initial rank."""
    faults: int = 1
    """One in each of the first iterations."""
    group: bool = False
    """A gloo group of all ranks with a time-out of 30 s; the other ranks wait in it for the victim."""
    soft_s: float = 0.0
    """0: the default."""
    hard_s: float = 0.0
    steady_s: float = 0.0
    """Every iteration begins with so long a time of steps."""
    repetitions: int = 0
    objects: int = 0
    """More Python objects that are alive."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def _hang(fault: str, **more: Any) -> Plan:
    return Plan(fault, soft_s=SOFT_S, hard_s=HARD_S, **more)


class Case(enum.Enum):
    """A name, a title and a plan."""

    EXCEPTION = ("exception", "one rank raises an exception, no process group", Plan("exception", faults=5))
    EXCEPTION_GLOO = (
        "exception_gloo",
        "one rank raises an exception, the others wait for it in a gloo all-reduce with 30 s time-out",
        Plan("exception", faults=3, group=True),
    )
    SIGKILL = ("sigkill", "one rank is killed by SIGKILL, no process group", Plan("sigkill"))
    SIGKILL_GLOO = (
        "sigkill_gloo",
        "one rank is killed by SIGKILL, the others wait for it in a gloo all-reduce",
        Plan("sigkill", group=True),
    )
    SIGKILL_FIRST = (
        "sigkill_first",
        "rank 0 is killed by SIGKILL, no process group",
        Plan("sigkill", victim=0),
    )
    LIVELOCK = (
        "livelock",
        f"one rank runs on without a ping; soft_timeout {SOFT_S:g} s, subtracted",
        _hang("livelock"),
    )
    C_COLLECTIVE = (
        "c_collective",
        f"one rank waits in a collective that nobody else joins; soft_timeout {SOFT_S:g} s, subtracted",
        _hang("c_collective", group=True),
    )
    C_SLEEP = (
        "c_sleep",
        f"one rank is blocked in C, and no abort helps; soft_timeout {SOFT_S:g} s, subtracted",
        _hang("c_sleep"),
    )
    C_GIL = (
        "c_gil",
        f"one rank is blocked in C with the GIL; soft_timeout {SOFT_S:g} s, subtracted",
        _hang("c_gil"),
    )
    COMPLETION = ("completion", "no fault", Plan("none", faults=0, steady_s=0.5))

    def __init__(self, word: str, title: str, plan: Plan) -> None:
        self.word = word
        self.title = title
        self.plan = plan


@dataclass(frozen=True)
class Marks:
    """What one rank wrote down."""

    rank: int
    lines: tuple[Mapping[str, Any], ...]

    def times(self, what: str) -> list[float]:
        return [line["t"] for line in self.lines if line["mark"] == what]

    def entered(self, iteration: int) -> float | None:
        """Return when the function was called for that iteration; None: it was not."""
        return self._when("enter", iteration)

    def struck(self, iteration: int) -> float | None:
        return self._when("fault", iteration)

    def _when(self, what: str, iteration: int) -> float | None:
        return next(
            (line["t"] for line in self.lines if (line["mark"], line.get("iteration")) == (what, iteration)),
            None,
        )


def read_marks(folder: Path) -> list[Marks]:
    """Return the marks of all ranks, in their order; a line that is cut short does not count."""
    found = []
    for path in folder.glob("rank*.jsonl"):
        lines = []
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                lines.append(json.loads(line))
        found.append(Marks(int(path.stem.removeprefix("rank")), tuple(lines)))
    return sorted(found, key=lambda marks: marks.rank)


def recoveries(plan: Plan, ranks: Sequence[Marks]) -> list[float]:
    """Return the seconds from each fault until the slowest of the other ranks was in the function again.

    Without ``soft_timeout`` where the fault is a hang. Faults after which not all were back are left out.
    """
    found = []
    for iteration in range(plan.faults):
        struck = next((t for marks in ranks if (t := marks.struck(iteration)) is not None), None)
        entered = [marks.entered(iteration + 1) for marks in ranks if marks.rank != plan.victim]
        back = [moment for moment in entered if moment is not None]
        if struck is not None and len(back) == len(entered):
            found.append(max(back) - struck - plan.soft_s)
    return found


def victim_survived(plan: Plan, ranks: Iterable[Marks]) -> bool:
    """Tell whether the process that met the last fault has called the function again."""
    return any(marks.rank == plan.victim and marks.entered(plan.faults) is not None for marks in ranks)


def begin_and_end(ranks: Sequence[Marks]) -> tuple[float, float] | None:
    """Return the seconds from the first call of the wrapped function until the function ran on all ranks, and
    from its last return until the wrapped function had returned on all; None if it never came to that."""
    moments = [[marks.times(what) for marks in ranks] for what in ("call", "enter", "return", "end")]
    if len(ranks) != RANKS or not all(all(each) for each in moments):
        return None
    call, enter, done, end = moments
    return (
        max(each[0] for each in enter) - max(each[0] for each in call),
        max(each[-1] for each in end) - max(each[-1] for each in done),
    )
