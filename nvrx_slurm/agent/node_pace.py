"""How long this node's ranks take: gathered from them, told in one message, and the scores given back."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from nvrx_slurm.agent.local_cycle import LocalCycle
from nvrx_slurm.pace.exchange import NodePeriod, Period, Scores, renumbered
from nvrx_slurm.pace.names import HeardNames, ToldNames, numbers_of
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rank_channel

_log = logging.getLogger(__name__)
_PATIENCE_S = 2.0
"""For the other ranks of the node after the first has told its period."""
_CONTEXT_S = 1.0
"""For the hardware to say how it is."""

Context = Callable[[Sequence[int]], Awaitable[dict[int, list[str]]]]
"""Returns lines about the hardware of local ranks."""


class NodePace:
    """Of one agent, over all cycles. Needs a running event loop."""

    def __init__(self, say: Callable[[msg.AgentMessage], None], context: Context) -> None:
        self._say = say
        self._context = context
        self._told = ToldNames()
        self._cycle: int | None = None
        self._heard: dict[int, HeardNames] = {}
        self._waiting: dict[int, Period] = {}
        """Periods that were not told yet, numbered by the node's names."""
        self._timer: asyncio.TimerHandle | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._warned = False

    def take(self, cycle: LocalCycle, request: rank_channel.PaceNames | rank_channel.PacePeriod) -> None:
        """Take what a rank of the running cycle says."""
        if cycle.cycle != self._cycle:
            self._cycle, self._heard = cycle.cycle, {}
            self._forget()
        match request:
            case rank_channel.PaceNames():
                heard = self._heard.setdefault(request.rank, HeardNames())
                if not heard.take(request.first, request.names) and not self._warned:
                    self._warned = True
                    _log.warning("rank %d has more names of kernels than are kept", request.rank)
            case rank_channel.PacePeriod():
                self._take_period(cycle, request.rank, request.period)

    def _take_period(self, cycle: LocalCycle, rank: int, period: Period) -> None:
        heard = self._heard.get(rank)
        numbers = numbers_of(heard.names, self._told) if heard is not None else []
        if rank in self._waiting:
            # The others are late: what this rank had said must not be mixed with what it says now.
            self._tell(cycle)
        self._waiting[rank] = renumbered(period, numbers)
        if self._waiting.keys() >= cycle.alive:
            self._tell(cycle)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._tell, cycle)

    def _tell(self, cycle: LocalCycle) -> None:
        waiting = self._waiting
        self._forget()
        task = asyncio.create_task(self._tell_with_context(cycle, waiting))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _forget(self) -> None:
        self._waiting = {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _tell_with_context(self, cycle: LocalCycle, periods: dict[int, Period]) -> None:
        try:
            locally = [rank - cycle.ranks[0] for rank in periods]
            found = await asyncio.wait_for(self._context(locally), _CONTEXT_S)
        except asyncio.TimeoutError:
            found = {}
        context = {cycle.ranks[0] + local: lines for local, lines in found.items() if lines}
        first, names = self._told.untold
        self._told.told(len(names))
        self._say(
            msg.NodePace(
                cycle=cycle.cycle,
                period=NodePeriod(first=first, names=names, ranks=periods, context=context),
            )
        )

    def give(self, cycle: LocalCycle, scores: msg.PaceScores) -> None:
        """Put the scores where the ranks look for them."""
        data = encode_scores(scores.scores)
        for rank in scores.to:
            if rank in cycle.page_paths:
                try:
                    _replace(rank_channel.pace_path(cycle.page_paths[rank]), data)
                except OSError as error:
                    _log.warning("rank %d does not get its scores: %s", rank, error)

    def close(self) -> None:
        """Say nothing any more."""
        self._forget()
        for task in self._telling:
            task.cancel()


encode_scores: Callable[[Scores], bytes] = msgspec.msgpack.Encoder().encode


def _replace(path: Path, data: bytes) -> None:
    """Write a file of memory anew: it need not outlive the machine, so nothing is synced."""
    draft = path.with_name(f".{path.name}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
    os.replace(draft, path)
