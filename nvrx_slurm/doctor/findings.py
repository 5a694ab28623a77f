"""One finding, and the numbered rules that make them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Snapshot = TypeVar("Snapshot")


class Status(enum.Enum):
    """How something stands."""

    OK = "ok"
    WARN = "warn"
    """Works, but something degrades."""
    PROBLEM = "problem"
    """Something will not work, or will be lost."""
    UNKNOWN = "unknown"
    """It could not be read; neither good nor bad."""


@dataclass(frozen=True)
class Answer:
    """What one rule says."""

    status: Status
    read: str
    """What was read, in few words."""
    why: str = ""
    """What follows from it; empty when there is nothing to say."""
    fix: str = ""
    """What to do."""
    line: int | None = None
    """Of the file that was read."""
    text: str = ""
    """That line."""


@dataclass(frozen=True)
class Finding:
    """An answer, with the rule that it comes from."""

    rule: str
    """``S7``: the rule's number in docs/doctor.md."""
    about: str
    answer: Answer

    @property
    def status(self) -> Status:
        return self.answer.status


def ok(read: str, why: str = "") -> Answer:
    return Answer(Status.OK, read, why)


def warn(read: str, why: str, fix: str, *, line: int | None = None, text: str = "") -> Answer:
    return Answer(Status.WARN, read, why, fix, line, text)


def problem(read: str, why: str, fix: str, *, line: int | None = None, text: str = "") -> Answer:
    return Answer(Status.PROBLEM, read, why, fix, line, text)


def unknown(read: str, why: str = "", fix: str = "") -> Answer:
    return Answer(Status.UNKNOWN, read, why, fix)


Check = Callable[[Snapshot], "Answer | Iterable[Answer] | None"]


@dataclass(frozen=True)
class Rule(Generic[Snapshot]):
    """A numbered check."""

    number: str
    about: str
    check: Check[Snapshot]

    def apply(self, snapshot: Snapshot) -> list[Finding]:
        """Return what the rule finds; a rule that does not apply finds nothing."""
        found = self.check(snapshot)
        if found is None:
            return []
        answers = [found] if isinstance(found, Answer) else found
        return [Finding(self.number, self.about, answer) for answer in answers]


class Rules(Generic[Snapshot]):
    """The rules of one group, in order."""

    def __init__(self) -> None:
        self.rules: list[Rule[Snapshot]] = []

    def rule(self, number: str, about: str) -> Callable[[Check[Snapshot]], Check[Snapshot]]:
        """Decorate a check."""

        def register(check: Check[Snapshot]) -> Check[Snapshot]:
            self.rules.append(Rule(number, about, check))
            return check

        return register

    def apply(self, snapshot: Snapshot) -> list[Finding]:
        return [finding for rule in self.rules for finding in rule.apply(snapshot)]


def worst(findings: Iterable[Finding]) -> Status:
    """Return the gravest status; an unknown is graver than a warning."""
    order = [Status.OK, Status.WARN, Status.UNKNOWN, Status.PROBLEM]
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)


def exit_code(findings: Iterable[Finding], *, blind: bool = False) -> int:
    """Return 1 if anything is a problem, else 0; a doctor who was ``blind`` never says 0."""
    return int(blind or any(finding.status is Status.PROBLEM for finding in findings))
