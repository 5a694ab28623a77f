"""Attribute a cycle that has just ended, as a Coordinator has it done: in a child process that may be killed.

It reads the run directory, adds the verdict to the job's history, writes the whole of it beside the cycle's
logs, and prints the journal's event, one line of JSON. It has little memory and the lowest priority, and ends
with its parent.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nvrx_slurm import linux
from nvrx_slurm.attribution.attribute import as_attempt, attribute
from nvrx_slurm.attribution.culprits import Culprit
from nvrx_slurm.attribution.from_journal import NoSuchCycleError, cycle_evidence, earlier_attempts
from nvrx_slurm.attribution.history import append_history
from nvrx_slurm.attribution.logs.rules import RulesError, load_rules
from nvrx_slurm.attribution.policy import Action, PolicyConfig, PolicyError, load_policy, with_jitter
from nvrx_slurm.attribution.verdict import Attribution
from nvrx_slurm.journal import CycleAttributed, Implicated, JournalError, read_journal
from nvrx_slurm.whole_file import replace_file

RULES_VARIABLE = "NVRX_ATTRIBUTION_RULES"
POLICY_VARIABLE = "NVRX_ATTRIBUTION_POLICY"
DOCUMENT = "attribution.json"
"""In the cycle's own folder."""
MEMORY = 3 * 2**30
"""Bytes of data, heap and stack; what mapped files take is not counted (setrlimit(2), RLIMIT_DATA)."""
_MAX_CULPRITS = 8
_MAX_TEXT = 400


def main() -> None:
    """Attribute cycle ``sys.argv[3]`` of the run directory ``sys.argv[2]``; ``sys.argv[4]`` is the parent."""
    linux.die_with_parent(signal.SIGKILL, int(sys.argv[4]))
    linux.set_process_name("nvrx-attribute")
    os.nice(19)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY if hard == resource.RLIM_INFINITY else min(hard, MEMORY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    run_dir, cycle = Path(sys.argv[2]), int(sys.argv[3])
    try:
        event = attribute_ended_cycle(run_dir, cycle)
    except (OSError, RulesError, PolicyError, JournalError, NoSuchCycleError) as error:
        event = CycleAttributed(failed=str(error)[:_MAX_TEXT])
    except MemoryError:
        event = CycleAttributed(failed=f"it needs more than {MEMORY >> 30} GiB of memory")
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")


def attribute_ended_cycle(run_dir: Path, cycle: int) -> CycleAttributed:
    """Attribute one cycle, and keep what was found.

    Raises:
        OSError: the run directory cannot be read.
        RulesError, PolicyError: the site's files, which the environment names, are wrong.
        JournalError, NoSuchCycleError: there is no such cycle to read of.
    """
    began = time.monotonic()
    rules_file, policy_file = os.environ.get(RULES_VARIABLE), os.environ.get(POLICY_VARIABLE)
    rules = load_rules(Path(rules_file) if rules_file else None)
    config = load_policy(Path(policy_file)) if policy_file else PolicyConfig()
    records = read_journal(run_dir / "journal.jsonl")
    evidence = cycle_evidence(run_dir, records, cycle)
    result = attribute(evidence, rules, config, earlier_attempts(run_dir, records, cycle))
    document = run_dir / "cycles" / str(cycle) / DOCUMENT
    file, lost = str(document.relative_to(run_dir)), ""
    try:
        append_history(run_dir, as_attempt(result, evidence.seconds))
        _write(document, json.dumps(result.document(), indent=2).encode())
    except OSError as error:
        # Most wanted where the disk is full: the verdict that says so, and has the job held.
        file, lost = "", f"; it could not be kept in the run directory: {error.strerror or error}"
    seconds, delay_s = time.monotonic() - began, with_jitter(result.decision, config, random.Random())
    found = brief(result, run_dir, file, seconds, delay_s)
    return msgspec.structs.replace(found, why=found.why + lost)


def brief(
    result: Attribution, run_dir: Path, file: str = "", seconds: float = 0.0, delay_s: float = 0.0
) -> CycleAttributed:
    """Return what a journal holds of a verdict.

    Its nodes to exclude are those of the decision that are implicated by what no program can print: traces, a
    kernel's, Slurm's or the launcher's own words.
    """
    primary, decision = result.choice.primary, result.decision
    known = {culprit.node for culprit in result.culprits if not culprit.forgeable}
    exclude = [node for node in decision.exclude if node in known]
    action = decision.action
    if action is Action.RESTART_EXCLUDE and not exclude:
        action = Action.RESTART
    return CycleAttributed(
        category=result.family.id,
        says=result.family.says,
        action=action.value,
        rule=decision.rule,
        why=_plain(decision.why),
        confidence=result.confidence,
        where="" if primary is None else _where(primary.source.path, primary.line, run_dir),
        excerpt="" if primary is None else _plain(primary.excerpt),
        culprits=_implicated(result.culprits),
        exclude=exclude,
        file=file,
        seconds=round(seconds, 3),
        delay_s=round(delay_s, 1),
    )


def _implicated(culprits: Sequence[Culprit]) -> list[Implicated]:
    return [
        Implicated(
            kind=culprit.kind,
            id=_plain(culprit.id),
            confidence=culprit.confidence,
            node=culprit.node,
            rank=culprit.rank,
            why=_plain("; ".join(culprit.reasons)),
            by_traces=culprit.by_traces,
        )
        for culprit in culprits[:_MAX_CULPRITS]
    ]


def _where(path: Path, line: int, run_dir: Path) -> str:
    if not path.is_absolute():
        return ""  # the launcher's or Slurm's word, no line of a log
    return f"{path.relative_to(run_dir) if path.is_relative_to(run_dir) else path}:{line}"


def _plain(text: str) -> str:
    """Without what could drive a terminal: lines of a log are the user's."""
    return "".join(c if c.isprintable() else " " for c in text)[:_MAX_TEXT]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, data)
