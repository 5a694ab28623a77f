"""What ``--json`` prints: one document, ``nvrx.doctor.v1``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from nvrx_slurm.doctor.findings import Finding, Status
from nvrx_slurm.doctor.timeouts import Ladder

SCHEMA = "nvrx.doctor.v1"


def document(
    command: str,
    findings: Sequence[Finding],
    code: int,
    *,
    ladders: Iterable[Ladder] = (),
    about: Mapping[str, object],
) -> str:
    """Return the document of one command; ``about`` says what was looked at."""
    content = {
        "schema": SCHEMA,
        "command": command,
        **about,
        "code": code,
        "counts": {status.value: sum(f.status is status for f in findings) for status in Status},
        "findings": [encode_finding(finding) for finding in findings],
        "timeouts": [_ladder(ladder) for ladder in ladders],
    }
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def encode_finding(finding: Finding) -> dict[str, object]:
    """Return one finding as JSON takes it."""
    answer = finding.answer
    return {
        "rule": finding.rule,
        "about": finding.about,
        "status": answer.status.value,
        "read": answer.read,
        "why": answer.why or None,
        "fix": answer.fix or None,
        "line": answer.line,
        "text": answer.text or None,
    }


def _ladder(ladder: Ladder) -> dict[str, object]:
    """Seconds; null and ``known: false`` where a value could not be read, null alone for no limit."""
    rungs = []
    for rung in ladder.rungs:
        finite = rung.seconds is not None and not math.isinf(rung.seconds)
        rungs.append(
            {
                "name": rung.name,
                "seconds": rung.seconds if finite else None,
                "known": rung.seconds is not None,
                "from": rung.origin,
            }
        )
    return {"ladder": ladder.title, "smallest_first": rungs}
