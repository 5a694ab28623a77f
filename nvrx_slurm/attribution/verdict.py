"""The result: what failed first, whose fault it is, what happens next; its document is ``attribution.v1``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.attribution.culprits import Culprit
from nvrx_slurm.attribution.flight_recorder import FlightReport
from nvrx_slurm.attribution.history import Counts
from nvrx_slurm.attribution.logs.finding import Finding
from nvrx_slurm.attribution.logs.rules import UNKNOWN, Family, Scope
from nvrx_slurm.attribution.policy import Decision
from nvrx_slurm.attribution.primary import Choice

SCHEMA = "attribution.v1"
MAX_EXPLANATION = 600


@dataclass(frozen=True)
class ProgressFacts:
    """How far the attempt had come."""

    first_step: int | None = None
    last_step: int | None = None
    saved_step: int | None = None
    loaded_step: int | None = None
    trained: bool | None = None


@dataclass(frozen=True)
class Coverage:
    """What was looked at."""

    bytes_read: int = 0
    lines: int = 0
    files: tuple[str, ...] = ()
    flight_dumps: int = 0
    kernel_nodes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """What was not, and lowers the confidence."""


@dataclass(frozen=True)
class Attribution:
    """One ended cycle's verdict object."""

    job: str
    attempt: int
    cycle: int
    produced_at: float
    choice: Choice
    scope: Scope
    culprits: tuple[Culprit, ...]
    progress: ProgressFacts
    fingerprint: str
    entity: str | None
    coverage: Coverage
    confidence: float
    explanation: str
    decision: Decision
    counts: Counts = field(default_factory=Counts)
    flight: FlightReport | None = None
    model: dict[str, Any] | None = None
    """What a language model added, if it was asked: see ``explain``."""

    @property
    def family(self) -> Family:
        return self.choice.primary.family if self.choice.primary else UNKNOWN

    @property
    def found(self) -> bool:
        """Something was found that may be the cause."""
        flight = self.flight is not None and self.flight.conclusive
        return (self.choice.primary is not None and self.family.decides) or flight

    @property
    def source(self) -> str:
        parts = ["rules"]
        if self.flight is not None:
            parts.append("fr")
        if self.model is not None:
            parts.append("llm")
        return "+".join(parts)

    def document(self) -> dict[str, Any]:
        """Return ``attribution.v1`` as plain values."""
        primary = self.choice.primary
        return {
            "schema": SCHEMA,
            "job": self.job,
            "attempt": self.attempt,
            "cycle": self.cycle,
            "produced_at": self.produced_at,
            "source": self.source,
            "primary": {**_finding(primary), "scope": self.scope.value} if primary else None,
            "secondary": [
                {**_finding(finding), "relation": relation.value}
                for finding, relation in self.choice.secondary
            ],
            "recovered": [_finding(finding) for finding in self.choice.recovered[:20]],
            "culprits": [_culprit(culprit) for culprit in self.culprits],
            "progress": {
                "first_step": self.progress.first_step,
                "last_completed_step": self.progress.last_step,
                "last_checkpoint_step": self.progress.saved_step,
                "loaded_step": self.progress.loaded_step,
                "trained": self.progress.trained,
            },
            "fingerprint": self.fingerprint,
            "entity": self.entity,
            "coverage": {
                "bytes_read": self.coverage.bytes_read,
                "lines": self.coverage.lines,
                "files": list(self.coverage.files),
                "fr_dumps": self.coverage.flight_dumps,
                "kmsg_nodes": list(self.coverage.kernel_nodes),
                "missing_sources": list(self.coverage.missing),
            },
            "confidence": self.confidence,
            "explanation": self.explanation,
            "decision": self._decision(),
            "flight_recorder": self.flight.document() if self.flight else None,
            "model": self.model,
        }

    def _decision(self) -> dict[str, Any]:
        return {
            "action": self.decision.action.value,
            "rule": self.decision.rule,
            "why": self.decision.why,
            "exclude": list(self.decision.exclude),
            "delay_s": self.decision.delay_s,
            "rejected": self.decision.rejected,
            "counted": self.decision.counted,
            "same_root_no_advance": self.counts.same_root_no_advance,
        }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "category": finding.family.id,
        "role": finding.family.role.value,
        "scope": finding.family.scope.value,
        "file": str(finding.source.path),
        "line_no": finding.line,
        "excerpt": finding.excerpt,
        "count": finding.count,
        "rank": finding.rank,
        "ranks": sorted(finding.ranks),
        "node": finding.node,
        "first_ts": finding.ts,
        "exception": finding.exception or None,
        "frame": finding.frame or None,
    }


def _culprit(culprit: Culprit) -> dict[str, Any]:
    return {
        "kind": culprit.kind,
        "id": culprit.id,
        "node": culprit.node,
        "confidence": culprit.confidence,
        "exclude": culprit.exclude.value,
        "reasons": list(culprit.reasons),
    }
