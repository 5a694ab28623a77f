"""Which of all findings is the first cause, and what the others are to it.

A cascade never wins over a root, wherever it stands: the victim's line is often printed first.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from nvrx_slurm.attribution.logs.finding import Finding, SourceKind
from nvrx_slurm.attribution.logs.prefix import Claim
from nvrx_slurm.attribution.logs.rules import Exclude, Role
from nvrx_slurm.attribution.logs.scan import Scan

_KERNEL_BEFORE_S = 15 * 60
_KERNEL_AFTER_S = 2 * 60
_AFTER_SYMPTOM_S = 1.0
_SAME_EVENT_S = 5.0
_MAX_SECONDARY = 20
_HARD = 83
"""Strength from which Slurm's and the launcher's own words outweigh every log."""


class Tier(enum.IntEnum):
    """How much a finding says of the cause; the highest decides."""

    NOTHING = 0
    """Cascades, and what training went on after."""
    WRAPPER = 1
    CANCELLED_STEP = 2
    """A step that was cancelled for no reason that Slurm tells: its launcher does so when a task fails."""
    AFTERMATH = 3
    """An exception of a rank that had waited in vain before."""
    SYMPTOM = 4
    UNVERIFIED = 5
    """A kernel's words in a text that any program can print."""
    ROOT = 6
    KERNEL = 7
    """A node's kernel or Slurm itself says so."""


class Relation(str, enum.Enum):
    """What a finding is to the primary one."""

    CONFIRMS = "confirms"
    CASCADE_OF = "cascade_of"
    TEARDOWN = "teardown"
    UNRELATED = "unrelated"


@dataclass(frozen=True)
class Choice:
    """The primary finding, if there is one, and the others in order of weight."""

    primary: Finding | None = None
    tier: Tier = Tier.NOTHING
    secondary: tuple[tuple[Finding, Relation], ...] = ()
    recovered: tuple[Finding, ...] = ()
    """Roots that training went on after."""


@dataclass
class _Ranked:
    finding: Finding
    tier: Tier
    order: int
    aligned: bool = False

    def key(self) -> tuple[float, ...]:
        ts = self.finding.ts
        return (
            -self.tier,
            -self.finding.family.strength,
            not self.aligned,
            ts is None,
            ts or 0.0,
            self.order,
        )


@dataclass
class _Judge:
    scans: Sequence[Scan]
    first_symptom: Finding | None = field(init=False)
    ended_badly: bool = field(init=False)
    trained_until: float | None = field(init=False)

    def __post_init__(self) -> None:
        final = [f for scan in self.scans for f in scan.findings if f.epoch == scan.progress.epoch]
        symptoms = [f for f in final if f.family.role is Role.SYMPTOM and f.ts is not None]
        self.first_symptom = min(symptoms, key=lambda f: f.ts or 0.0, default=None)
        # Not the kernel's: a node has many events that concern nobody.
        self.ended_badly = any(f.source.kind is not SourceKind.KERNEL for f in final)
        marks = [s.progress.last_ts for s in self.scans if s.progress.last_ts is not None]
        self.trained_until = max(marks, default=None)

    def competes(self, finding: Finding, scan: Scan) -> bool:
        """Tell whether training did not go on after the finding."""
        if not finding.of_job:
            return False
        if finding.source.kind is SourceKind.KERNEL:
            return self._in_time(finding)
        behind = scan.progress.epoch - finding.epoch
        if behind == 0:
            # In a file without progress of its own, time tells.
            if scan.progress.advances == 0 and self.trained_until is not None and finding.last_ts is not None:
                return (
                    finding.last_ts >= self.trained_until - _AFTER_SYMPTOM_S or not finding.family.transient
                )
            return True
        # One more step may be printed after the fault of another rank.
        fatal = finding.family.role is Role.ROOT and not finding.family.transient
        return behind == 1 and fatal and self.ended_badly and not self._later_root(finding, scan)

    def _later_root(self, finding: Finding, scan: Scan) -> bool:
        return any(
            other.epoch == scan.progress.epoch and other.family.role is Role.ROOT
            for other in scan.findings
            if other is not finding
        )

    def _in_time(self, finding: Finding) -> bool:
        if finding.ts is None or self.first_symptom is None or self.first_symptom.ts is None:
            return True
        since = finding.ts - self.first_symptom.ts
        return -_KERNEL_BEFORE_S <= since <= _KERNEL_AFTER_S

    def tier(self, finding: Finding) -> Tier:
        family = finding.family
        match family.role:
            case Role.WRAPPER:
                return Tier.WRAPPER
            case Role.SYMPTOM:
                return Tier.SYMPTOM
            case Role.ROOT:
                return self._tier_of_root(finding)
            case _:
                return Tier.NOTHING

    def _tier_of_root(self, finding: Finding) -> Tier:
        if finding.trusted:
            of_the_job = finding.source.kind is SourceKind.SCHEDULER
            hard = (
                finding.family.strength >= _HARD if of_the_job else finding.family.exclude is not Exclude.NO
            )
            return Tier.KERNEL if hard else Tier.ROOT
        if finding.claim is Claim.KERNEL:
            return Tier.UNVERIFIED if finding.family.exclude is not Exclude.NO else Tier.ROOT
        if finding.family.id == "slurm.cancelled" and "step" in finding.excerpt.lower():
            return Tier.CANCELLED_STEP
        symptom = self.first_symptom
        if (
            finding.family.id == "code.exception"
            and symptom is not None
            and symptom.ts is not None
            and finding.ts is not None
            and finding.ts > symptom.ts + _AFTER_SYMPTOM_S
            and finding.rank is not None
            and finding.rank == symptom.rank
        ):
            return Tier.AFTERMATH
        return Tier.ROOT

    def aligned(self, finding: Finding) -> bool:
        """Tell whether the finding stands where a collective that timed out later had begun."""
        symptom = self.first_symptom
        if symptom is None or symptom.timeout_s is None or symptom.ts is None or finding.ts is None:
            return False
        tolerance = max(5.0, min(60.0, 0.1 * symptom.timeout_s))
        return abs(symptom.ts - symptom.timeout_s - finding.ts) <= tolerance


def choose(scans: Sequence[Scan]) -> Choice:
    """Return the first cause among the findings of one cycle's logs."""
    judge = _Judge(scans)
    competing: list[_Ranked] = []
    recovered: list[Finding] = []
    others_words: list[Finding] = []
    order = 0
    for scan in scans:
        for finding in sorted(scan.findings, key=lambda f: f.line):
            order += 1
            if judge.competes(finding, scan):
                competing.append(_Ranked(finding, judge.tier(finding), order, judge.aligned(finding)))
            elif not finding.of_job:
                others_words.append(finding)
            elif finding.family.role is Role.ROOT:
                recovered.append(finding)
    competing.sort(key=_Ranked.key)
    if not competing or competing[0].tier <= Tier.NOTHING:
        rest = tuple((r.finding, Relation.UNRELATED) for r in competing[:_MAX_SECONDARY])
        return Choice(secondary=rest, recovered=tuple(recovered))
    first, *others = _driver_first(competing)
    confirming = [found for found in others_words if _says_the_same(first.finding, found)]
    secondary = [(found, Relation.CONFIRMS) for found in confirming]
    secondary += [(r.finding, _relation(first, r)) for r in others]
    return Choice(first.finding, first.tier, tuple(secondary[:_MAX_SECONDARY]), tuple(recovered))


def _driver_first(competing: list[_Ranked]) -> list[_Ranked]:
    """Put the driver's words before what a program says of the same GPU: unverified, but the cause of it.

    Such text alone excludes no node, as little as the program's.
    """
    first = competing[0]
    if first.tier is not Tier.ROOT or first.finding.trusted or not first.finding.family.of_gpu:
        return competing
    driver = next((r for r in competing if r.tier is Tier.UNVERIFIED and r.finding.family.of_gpu), None)
    return competing if driver is None else [driver, *(r for r in competing if r is not driver)]


def _says_the_same(first: Finding, other: Finding) -> bool:
    """Tell whether a line of Slurm's that names no job is about the same event."""
    if other.family.id != first.family.id or first.ts is None or other.ts is None:
        return False
    return abs(other.ts - first.ts) <= _SAME_EVENT_S


def _relation(first: _Ranked, other: _Ranked) -> Relation:
    family = other.finding.family
    if family.id == first.finding.family.id or family.role in (Role.CONFIRM, Role.WRAPPER):
        return Relation.CONFIRMS
    if family.role in (Role.CASCADE, Role.SYMPTOM):
        return Relation.CASCADE_OF
    late, early = other.finding.ts, first.finding.ts
    if other.tier in (Tier.AFTERMATH, Tier.CANCELLED_STEP) or (late and early and late > early):
        return Relation.TEARDOWN
    return Relation.UNRELATED
