"""The node's health during a job: before its first cycle, between cycles, and now and then beside training.

The checks run in a helper process at low priority. Only a node that joins waits for it; a restart goes on
with the verdict that is known, and hears of a fresh one when the next cycle is just beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nvrx_slurm.health.helper import Answer
from nvrx_slurm.health.report import HealthReport
from nvrx_slurm.health.result import CheckResult, Status
from nvrx_slurm.interpreter import command_for
from nvrx_slurm.wire import messages as msg

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

FIRST_VERDICT_S = 20.0
"""How long a node that joins waits for its first verdict, while the worker server imports torch. The checks
end by their own budget, 10 s; this is for a helper that does not get there."""
_INTERVAL_S = 60.0
"""To the next look or to a new helper, until the site's configuration is known."""
_END_S = 1.0
_ANSWER_S = 30.0
"""Longer than any budget of the checks: a helper that says nothing for so long is replaced."""
_MOST_FINDINGS = 16
_MOST_CHARACTERS = 300
_MOST_BYTES = 4 << 20


class HealthWatch:
    """Keeps the verdict on this node fresh, and tells of every change."""

    def __init__(
        self,
        config: str,
        state_dir: Path,
        environ: Mapping[str, str],
        say: Callable[[msg.AgentMessage], None],
    ) -> None:
        """Start the helper and its first look. Needs a running event loop.

        Args:
            config: the site's file; empty: the default one.
            state_dir: of this job's agent alone.
            environ: of the job.
            say: queues a message to the Coordinator and returns at once.
        """
        self._command = command_for("nvrx_slurm.health.helper", config, str(state_dir))
        # Where Slurm does not tell: what the kernel said before this agent was there is not the job's.
        self._environ = {"SLURM_JOB_START_TIME": str(int(time.time())), **environ}
        self._say = say
        self._interval_s = _INTERVAL_S
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._fresh = asyncio.Event()
        self._verdict: msg.NodeHealth | None = None
        self._may_tell = False
        self._watching = asyncio.create_task(self._watch())

    async def first_verdict(self) -> msg.NodeHealth | None:
        """Return the first verdict; None if it takes too long: it is told when it is there.

        From then on every change is told.
        """
        await self.settle(FIRST_VERDICT_S)
        self._may_tell = True
        return self._verdict

    def complaints(self) -> list[str]:
        """Return what the last verdict finds, a line each."""
        findings = self._verdict.findings if self._verdict is not None else []
        return [f"{finding.check} {finding.scope}: {finding.evidence}" for finding in findings]

    def refresh(self) -> None:
        """Have the node looked at now."""
        if not self._watching.done():
            self._fresh.clear()
            self._wanted.set()

    async def settle(self, patience_s: float) -> None:
        """Wait until what was asked for last is known and told, but not longer than ``patience_s``."""
        fresh = asyncio.create_task(self._fresh.wait())
        waited: set[asyncio.Future[Any]] = {fresh, self._watching}
        try:
            await asyncio.wait(waited, timeout=max(0.0, patience_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            fresh.cancel()

    async def close(self) -> None:
        """End the helper."""
        self._watching.cancel()
        await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        """Look whenever somebody wants to know, and at intervals; with a new helper where one has ended."""
        while True:
            try:
                going_on = await self._with_helper()
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                _log.warning("this node's health checks are interrupted: %s", str(error) or "no answer")
                going_on = True
            if not going_on:
                return
            # Nobody should wait for what is not coming.
            self._fresh.set()
            await self._pause()

    async def _with_helper(self) -> bool:
        """Serve with one helper until it ends; False: a new one would be of no use.

        Raises:
            OSError: it can't be started, or its pipes broke.
            ValueError: it says what nobody understands.
            asyncio.TimeoutError: it says nothing.
        """
        # Not asyncio's: whoever kills all that is below this process also waits for it.
        helper = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environ, bufsize=0
        )
        assert helper.stdin is not None
        assert helper.stdout is not None
        answers = asyncio.StreamReader(limit=_MOST_BYTES)
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), helper.stdout)
            while True:
                self._wanted.clear()
                helper.stdin.write(b"\n")
                line = await _within(_ANSWER_S, answers.readline())
                if not line:
                    raise OSError("the helper has ended")
                answer = msgspec.json.decode(line, type=Answer)
                if answer.report is None:
                    _log.warning("this node's health is not looked at: %s", answer.error)
                    return False
                self._interval_s = answer.interval_s or _INTERVAL_S
                self._took(answer.report)
                await self._pause()
        finally:
            helper.stdin.close()
            helper.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await loop.run_in_executor(None, helper.wait, _END_S)

    async def _pause(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await _within(self._interval_s, self._wanted.wait())

    def _took(self, report: HealthReport) -> None:
        before, self._verdict = self._verdict, verdict_of(report)
        known = before is not None and _same(before, self._verdict)
        if self._may_tell and not known:
            self._say(self._verdict)
        if not self._wanted.is_set():
            self._fresh.set()


async def _within(seconds: float, coroutine: Coroutine[Any, Any, _T]) -> _T:
    """As asyncio.wait_for, which before Python 3.12 swallows a cancellation that comes with the result.

    Raises:
        asyncio.TimeoutError: it takes longer.
    """
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


def verdict_of(report: HealthReport) -> msg.NodeHealth:
    """Return what is worth telling: failures first, then warnings."""
    found = [result for result in report.results if result.status in (Status.FAIL, Status.WARN)]
    found.sort(key=lambda result: result.status is Status.WARN)
    return msg.NodeHealth(
        findings=[_finding(result) for result in found[:_MOST_FINDINGS]], seconds=report.seconds
    )


def _finding(result: CheckResult) -> msg.HealthFinding:
    return msg.HealthFinding(
        check=result.check,
        scope=result.scope[:_MOST_CHARACTERS],
        failed=result.status is Status.FAIL,
        evidence=result.evidence[:_MOST_CHARACTERS],
        remedy=result.remedy[:_MOST_CHARACTERS],
        node_lost=result.node_lost,
    )


def _same(one: msg.NodeHealth, other: msg.NodeHealth) -> bool:
    """Tell whether two verdicts differ in words only: how many times, how much free."""

    def essence(health: msg.NodeHealth) -> set[tuple[str, str, bool]]:
        return {(finding.check, finding.scope, finding.failed) for finding in health.findings}

    return essence(one) == essence(other)
