"""The job's time limit as a timer of our own: ranks are asked to save, also without ``--signal``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from nvrx_slurm.slurm import Job, SlurmUnavailableError, UnknownJobError


async def watch_time_limit(
    ends: int | None,
    margin_s: float,
    ask: Callable[[], Awaitable[Job]],
    near: Callable[[str], None],
    clock: Callable[[], float] = time.time,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Call ``near`` once, ``margin_s`` before the job's time is over.

    Slurm is asked again before that, since the limit may have been changed. A job that never had so much time
    is asked when half of it is over.

    Args:
        ends: Unix seconds; None: there is no limit, and this returns at once.
        margin_s: what saving may take.
        ask: Slurm for the job.
        near: takes the words for it, with how much time is left.
        clock: Unix seconds.
        wait: for so many seconds.
    """
    if ends is None:
        return
    margin_s = min(margin_s, max(0.0, ends - clock()) / 2)
    while ends is not None:
        left = ends - margin_s - clock()
        if left > 0:
            await wait(left)
        try:
            job = await ask()
        except SlurmUnavailableError:
            pass  # what was known before has to do
        except UnknownJobError:
            return
        else:
            ends = job.ends
        if ends is not None and ends - margin_s <= clock():
            near(f"the time limit, {max(0.0, ends - clock()):.0f} s away")
            return
