"""Asks a site's own attribution service about each cycle, as NVIDIA's ft_launcher does; nothing waits for it.

The service reads the cycle's log itself, from the shared file system. POST /logs tells it of a log when its
cycle begins (``analysis_intent`` ``progressive``) and when a fault has ended it (``terminal``). Then GET
/logs is asked until it says ``completed``. Of its recommendations only STOP is more than told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from nvrx_slurm import journal
from nvrx_slurm.coordinator.http_request import HttpError, request
from nvrx_slurm.coordinator.tasks import cancel_all
from nvrx_slurm.journal import CycleAttributed, Record

BY = "service"
_REQUEST_S = 5.0
_POLL_S = 2.0
_ANALYSIS_S = 600.0
_LAST_S = 5.0
"""At the end of a job that has failed: for what the service has not answered by then."""
_MOST = 4
"""Cycles that it is asked about at a time; of more, the oldest is given up."""
_ACTIONS = {"STOP": "stop", "RESTART": "restart", "CONTINUE": "restart"}


class _Recommendation(msgspec.Struct, frozen=True):
    action: str = "UNKNOWN"
    """``STOP``, ``RESTART``, ``CONTINUE``, ``UNKNOWN``, ``TIMEOUT``."""
    reason: str = ""


class _Answer(msgspec.Struct, frozen=True):
    status: str = ""
    recommendation: _Recommendation = _Recommendation()


_decoder = msgspec.json.Decoder(_Answer)


def user_name() -> str:
    """Return whose job it is."""
    return os.environ.get("SLURM_JOB_USER") or os.environ.get("USER") or str(os.getuid())


class AttributionService:
    """One job's conversation with the service. Needs a running event loop.

    Args:
        endpoint: its URL, to which ``/logs`` is appended.
        log_of: the log of a cycle.
        tell: called with what it says, and the cycle.
    """

    def __init__(
        self,
        endpoint: str,
        log_of: Callable[[int], Path],
        user: str,
        job_id: str,
        tell: Callable[[CycleAttributed, int], None],
    ) -> None:
        self._url = endpoint.rstrip("/") + "/logs"
        self._log_of = log_of
        self._user = user
        self._job_id = job_id
        self._tell = tell
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._announcing: set[asyncio.Task[None]] = set()
        self._asked_to_end = False

    def take(self, record: Record) -> None:
        """Take what has happened."""
        match record.event:
            case journal.CycleStarted():
                task = asyncio.create_task(self._announce(record.cycle))
                self._announcing.add(task)
                task.add_done_callback(self._announcing.discard)
            case journal.StopRequested():
                self._asked_to_end = True
            case journal.Verdict(kind=kind) if kind is not None and record.cycle not in self._asking:
                while len(self._asking) >= _MOST:
                    self._asking.pop(min(self._asking)).cancel()
                self._asking[record.cycle] = asyncio.create_task(self._ask(record.cycle))
            case _:
                pass

    async def finish(self, failed: bool) -> None:
        """Ask no more; wait a little for what it has been asked if the job has ``failed`` by itself."""
        if self._asking and failed and not self._asked_to_end:
            await asyncio.wait(self._asking.values(), timeout=_LAST_S)
        await cancel_all([*self._asking.values(), *self._announcing])

    async def _announce(self, cycle: int) -> None:
        # If that fails: it is told when the cycle has ended.
        with contextlib.suppress(HttpError):
            await self._post(cycle, "progressive")

    async def _ask(self, cycle: int) -> None:
        try:
            found = await asyncio.wait_for(self._analysis(cycle), _ANALYSIS_S)
        except HttpError as error:
            found = CycleAttributed(by=BY, failed=f"{self._url}: {error}"[:400])
        except asyncio.TimeoutError:
            found = CycleAttributed(by=BY, failed=f"{self._url}: not analysed within {_ANALYSIS_S:g} s")
        self._asking.pop(cycle, None)
        self._tell(found, cycle)

    async def _post(self, cycle: int, intent: str) -> None:
        what = {
            "log_path": str(self._log_of(cycle)),
            "user": self._user,
            "job_id": self._job_id,
            "analysis_intent": intent,
        }
        await request("POST", self._url, msgspec.json.encode(what), _REQUEST_S)

    async def _analysis(self, cycle: int) -> CycleAttributed:
        """Return what it says in the end; a question that fails is asked again: the service may restart."""
        await self._post(cycle, "terminal")
        query = urlencode({"log_path": str(self._log_of(cycle)), "wait": "false"})
        while True:
            try:
                answer = _decoder.decode(await request("GET", f"{self._url}?{query}", None, _REQUEST_S))
            except HttpError:
                answer = _Answer()
            except msgspec.DecodeError as error:
                raise HttpError(f"its answer cannot be read: {error}") from error
            if answer.status == "completed":
                return _found(answer.recommendation)
            await asyncio.sleep(_POLL_S)


def _found(said: _Recommendation) -> CycleAttributed:
    reason = "".join(c if c.isprintable() else " " for c in said.reason)[:400]
    action = _ACTIONS.get(said.action, "unknown")
    why = reason or f"it recommends {action}"
    return CycleAttributed(by=BY, category="unknown", action=action, rule=BY, why=why)
