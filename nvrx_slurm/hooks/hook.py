"""One run of a hook: look at the node, and act on what is found.

What stops a node is a positive finding, and Slurm's word that draining it is right. Everything else passes.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nvrx_slurm.health import strikes
from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Check
from nvrx_slurm.health.report import examine, select
from nvrx_slurm.health.result import CheckResult, Status
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.take_baseline import remember_baseline
from nvrx_slurm.health.text import line
from nvrx_slurm.health.verdict import failures
from nvrx_slurm.hooks.cleanup import clean, find_leftovers
from nvrx_slurm.hooks.context import HookContext
from nvrx_slurm.hooks.drain import drain
from nvrx_slurm.slurm.administration import NodeAdmin
from nvrx_slurm.slurm.client import SlurmRefusedError, SlurmUnavailableError

_PATIENCE = 5
SLURM_S = 20.0
"""Of a hook's time, what is kept for Slurm: six questions at most, and the second look at the brake."""


class ExitCode(enum.IntEnum):
    """What the script that slurmd runs goes by. No interpreter or shell ends with the second by itself."""

    PASS = 0
    NODE_FAILED = 17


@dataclass(frozen=True)
class Hook:
    """One hook on one node.

    Args:
        say: one line for the log of the node.
        limit_s: the script that runs this ends it then.
    """

    context: HookContext
    node: Node
    checks: Mapping[str, Check]
    config: HealthConfig
    admin: NodeAdmin
    say: Callable[[str], None]
    limit_s: float
    wait: Callable[[float], None] = time.sleep

    def run(self) -> ExitCode:
        """Do everything; return how the script shall end."""
        stage = self.node.stage
        if stage is Stage.EPILOG:
            try:
                self._clean_up()
            except Exception as error:
                # What a user leaves must not keep the node from being looked at.
                self.say(f"not cleaned up: {type(error).__name__}: {error}")
        if self.context.accusation:
            self.say(f"job {self.context.job.job_id} accuses this node: {self.context.accusation}")
        budget_s = self.config.budget_s
        if self._deep:
            budget_s = self.limit_s
        report = examine(
            self._selected(), self.node, self.config, max(1.0, min(budget_s, self.limit_s - SLURM_S))
        )
        for result in report.results:
            if result.status in (Status.WARN, Status.FAIL):
                self.say(line(result))
        found = failures(report.results)
        if found:
            return self._act_on(found)
        if stage is Stage.PROLOG:
            self._remember()
        return ExitCode.PASS

    @property
    def _deep(self) -> bool:
        return bool(self.context.accusation)

    def _selected(self) -> Sequence[Check]:
        chosen = select(self.checks, self.node.stage, self.config)
        if self._deep:
            deep = select(self.checks, self.node.stage, self.config, self.config.hooks.deep_checks)
            chosen += [check for check in deep if check not in chosen]
        return chosen

    def _act_on(self, found: Sequence[CheckResult]) -> ExitCode:
        worst = found[0]
        if len(found) > 1:
            worst = replace(worst, evidence=f"{worst.evidence} and {len(found) - 1} more")
        now = self.node.clock.now()
        share = self.config.hooks.brake_share
        drained = drain(self.admin, self.context.node, worst, share, now, self.wait)
        self.say(f"node {self.context.node} {drained.told}")
        if not drained.outcome.out_of_service:
            return ExitCode.PASS
        if self.node.stage is Stage.PROLOG:
            self._start_elsewhere()
        return ExitCode.NODE_FAILED

    def _start_elsewhere(self) -> None:
        job = self.context.job.job_id
        try:
            self.admin.start_elsewhere(job)
            self.say(f"job {job} is requeued, and starts elsewhere")
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            self.say(f"job {job} is not requeued by this hook, Slurm does with it as configured: {error}")

    def _remember(self) -> None:
        """Take the baseline that the epilog compares with, unless something may turn out to be wrong."""
        if strikes.pending(self.node.state):
            self.say("no new baseline: a failure has been seen that may count the next time")
        elif why := remember_baseline(replace(self.node)):
            self.say(f"no new baseline: {why}")

    def _has_other_jobs(self, uid: int) -> bool:
        """Tell whether the user has other jobs here, so that what is there may be theirs.

        Of jobs that end together each sees the others: the last one waits a moment for them.

        Raises:
            SlurmUnavailableError
        """
        mine = int(self.context.job.job_id)
        for patience in range(_PATIENCE, -1, -1):
            others = [job for job in self.admin.jobs_of(uid, self.context.node) if job.job_id != mine]
            if not others or not patience:
                break
            if not all(job.completing and job.job_id < mine for job in others):
                break
            self.wait(1.0)
        return bool(others)

    def _clean_up(self) -> None:
        uid, settings = self.context.job.uid, self.config.hooks
        if not settings.clean_up or uid is None or uid < settings.clean_up_from_uid:
            return
        left = find_leftovers(uid)
        if not left:
            return
        try:
            if self._has_other_jobs(uid):
                return
        except SlurmUnavailableError as error:
            self.say(f"user {uid} has left {left}: not cleaned up, Slurm could not be asked: {error}")
            return
        remains = clean(left, uid)
        self.say(f"user {uid} had left {left}: {remains or 'cleaned up'}")
