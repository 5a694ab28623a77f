"""Attribute logs while they grow."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.attribution.attribute import conclude
from nvrx_slurm.attribution.evidence import CycleEvidence
from nvrx_slurm.attribution.history import Attempt
from nvrx_slurm.attribution.logs.finding import Source
from nvrx_slurm.attribution.logs.reading import open_log
from nvrx_slurm.attribution.logs.rules import RuleSet
from nvrx_slurm.attribution.logs.scan import BLOCK, LogScanner
from nvrx_slurm.attribution.policy import PolicyConfig
from nvrx_slurm.attribution.verdict import Attribution


@dataclass
class _File:
    source: Source
    scanner: LogScanner
    offset: int = 0


class Follower:
    """The verdict on logs as far as they are written; a truncated log begins anew."""

    def __init__(
        self,
        evidence: CycleEvidence,
        rules: RuleSet,
        config: PolicyConfig,
        history: Sequence[Attempt] = (),
    ) -> None:
        self._evidence, self._rules, self._config, self._history = evidence, rules, config, history
        self._files = [_File(source, LogScanner(source, rules)) for source in evidence.logs]
        self._said: tuple[object, ...] | None = None
        self.result = self._conclude()

    def update(self) -> bool:
        """Read what was added; return whether cause, culprits or decision have changed.

        Raises:
            OSError: a log cannot be read.
        """
        for file in self._files:
            self._read(file)
        self.result = self._conclude()
        said = (self.result.fingerprint, self.result.decision, [c.id for c in self.result.culprits])
        changed, self._said = said != self._said, said
        return changed

    def line(self) -> str:
        """Return the verdict so far as one line."""
        result = self.result
        who = f"; {result.culprits[0].kind} {result.culprits[0].id}" if result.culprits else ""
        step = "" if result.progress.last_step is None else f"step {result.progress.last_step}: "
        if result.choice.primary is None:
            return f"{step}nothing failed so far"
        return f"{step}{result.family.says} [{result.family.id}]{who}; next: {result.decision.action.value}"

    def finish(self) -> Attribution:
        """Return the verdict, the unfinished last lines included."""
        for file in self._files:
            file.scanner.finish()
        return self._conclude()

    def _read(self, file: _File) -> None:
        with open_log(file.source.path, follow_link=not file.source.is_run_dirs) as stream:
            if not stream.seekable():
                path = str(file.source.path)
                raise OSError(errno.ESPIPE, "a pipe is read without --follow", path)
            size = stream.seek(0, 2)
            if size < file.offset:
                file.scanner, file.offset = LogScanner(file.source, self._rules), 0
            stream.seek(file.offset)
            while block := stream.read(BLOCK):
                file.scanner.feed(block)
                file.offset += len(block)

    def _conclude(self) -> Attribution:
        scans = [file.scanner.scan for file in self._files]
        return conclude(self._evidence, self._rules, scans, config=self._config, history=self._history)
