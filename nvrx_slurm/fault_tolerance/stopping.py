"""Stop in good order: ask from any process of a rank whether to; keep data-loader workers alive until then.

Of a rank the main process alone gets the agent's SIGTERM. But Slurm signals every process of a step: by
``scancel``, or by ``--signal`` without ``B:``. A data-loader worker that dies of it takes the main process
along, in the middle of its last checkpoint; :func:`outlive_stop_signals` prevents that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from nvrx_slurm.wire.page import PAGE_VARIABLE, HeartbeatPage

WORKER_GRACE_S = 60
"""Longer than Slurm waits between SIGTERM and SIGKILL (``KillWait``, 30 s by default)."""

_page: HeartbeatPage | None = None
_page_path: str | None = None
_signalled = False


def should_stop() -> bool:
    """Tell whether the job was asked to stop soon, in a rank or any process that it has forked or spawned.

    As :meth:`RankMonitorClient.should_stop`, but it needs no client. Also true after a signal of
    :func:`stop_on_signals` in this process. Under plain ``torchrun``, without an agent, only the latter.
    """
    return _signalled or requested_by_agent()


def signalled() -> bool:
    """Tell whether a signal of :func:`stop_on_signals` has come."""
    return _signalled


def requested_by_agent() -> bool:
    """Tell what the rank's page says, False without one."""
    global _page, _page_path
    path = os.environ.get(PAGE_VARIABLE)
    if path != _page_path:
        _page_path = path
        try:
            _page = HeartbeatPage.open(Path(path)) if path else None
        except (OSError, ValueError):
            # The cycle is over: this process is about to be killed.
            _page = None
    return _page is not None and _page.stop_requested


def stop_on_signals(signals: Sequence[signal.Signals] = (signal.SIGUSR1, signal.SIGUSR2)) -> None:
    """From now on these signals make ``should_stop()`` true instead of ending the process. Main thread only.

    nvrx-srun needs no signal to reach ranks; this is for Slurm's ``--signal`` without ``B:``, and for plain
    ``torchrun``. With SIGTERM among them a rank that waits in a collective for a peer that is gone does not
    end when a restart stops it: it is killed after ``--workers-stop-timeout``.

    Raises:
        ValueError: not in the main thread.
    """

    def note(_signal: int, _frame: FrameType | None) -> None:
        global _signalled
        _signalled = True

    for sig in signals:
        signal.signal(sig, note)


def outlive_stop_signals(worker_id: int = 0) -> None:
    """In a data-loader worker: go on after a signal to stop, for a minute at most.

    For ``DataLoader(worker_init_fn=outlive_stop_signals)``, whatever the start method; another
    ``worker_init_fn`` calls it first. torch ends a worker whose main process is gone, as ever.
    """

    def end_later(_signal: int, _frame: FrameType | None) -> None:
        signal.alarm(WORKER_GRACE_S)

    signal.signal(signal.SIGTERM, end_later)
    for sig in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_IGN)
