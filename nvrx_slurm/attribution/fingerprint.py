"""What two failures of one cause have in common: no rank, node, time, number or size."""

from __future__ import annotations

import hashlib
import re

from nvrx_slurm.attribution.flight_recorder import FlightReport
from nvrx_slurm.attribution.logs.finding import Finding
from nvrx_slurm.attribution.logs.shape import shape

_ARTIFACT = re.compile(
    r"(/[\w.@=+/-]{1,300}|[\w.@=+-]{1,200}\.(?:pt|ckpt|safetensors|distcp|bin|idx|parquet|npy|tar))"
)
_SAMPLE = re.compile(
    r"\b(sample|token|window|batch|document|record)s?(?: (?:id|index|number|no))?[ :=#]{1,3}(\d{1,15})", re.I
)


def fingerprint(finding: Finding) -> str:
    """Return the category and a digest of exception type, innermost user frame and message."""
    message = shape(finding.excerpt).lower()
    if finding.exception:
        message = message.rpartition(finding.exception.lower())[2]
        parts = [finding.exception, finding.frame, message]
    else:
        parts = [finding.family.id]  # lines of one family differ by what must not count
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{finding.family.id}:{digest}"


def flight_fingerprint(report: FlightReport) -> str:
    """Return that of a stall: the classes of the culprits and where they stood."""
    parts = sorted(
        {
            f"{culprit.kind.value}:{e.description}:{e.op}"
            for culprit in report.culprits
            for e in culprit.evidence[:1]
        }
        or {culprit.kind.value for culprit in report.culprits}
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def entity(finding: Finding) -> str | None:
    """Return the exact artifact or data position that a message names, or None."""
    found = _SAMPLE.search(finding.excerpt)
    if found:
        return f"{found.group(1).lower()} {found.group(2)}"
    artifact = _ARTIFACT.search(finding.excerpt)
    if artifact and finding.family.id.startswith(("ckpt.", "storage.", "data.")):
        return artifact.group(1)
    return None
