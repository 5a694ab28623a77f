"""When a rank has been silent for too long: pure, on absolute deadlines."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from nvrx_slurm.supervisor.page import Phase, Reading

UNBLOCK_NS = 100_000_000
"""What an abort, and a main thread that it has unblocked, get before the rank is taken for stuck."""
UNBLOCK_BUSY_NS = 500_000_000
"""The same for a main thread that is running: it may only lack a processor."""
FAR_NS = 2**62


class Verdict(enum.Enum):
    FINE = enum.auto()
    SOFT = enum.auto()
    """No progress for the soft time-out."""
    STUCK = enum.auto()
    """Interrupted, past the soft time-out, and the abort has not brought it back."""
    HARD = enum.auto()
    """To be killed."""


@dataclass(frozen=True)
class Timeouts:
    soft_ns: int
    hard_ns: int


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    look_again_ns: int
    """Absolute: before that nothing can change unless the rank moves."""
    why: str = ""


def judge(
    reading: Reading, timeouts: Timeouts, now_ns: int, interrupted_ns: int, main_is_running: bool
) -> Judgement:
    """Tell what the supervisor is to do about its rank.

    Args:
        reading: its page.
        timeouts: what it was told.
        now_ns: the time.
        interrupted_ns: when the iteration was interrupted; 0: it was not.
        main_is_running: the kernel has the main thread running or runnable.
    """
    if reading.phase is Phase.WAITING or not reading.protected:
        return Judgement(Verdict.FINE, FAR_NS)
    silent_since, what = _last_sign(reading, interrupted_ns)
    hard_at = silent_since + timeouts.hard_ns
    if interrupted_ns:
        # Whatever keeps it: it was interrupted so long ago.
        hard_at = min(hard_at, max(interrupted_ns, reading.since_ns) + timeouts.hard_ns)
    if now_ns >= hard_at:
        return Judgement(Verdict.HARD, FAR_NS, f"{what} for {_seconds(timeouts.hard_ns)}")
    if reading.phase is Phase.RECOVERY:
        return Judgement(Verdict.FINE, hard_at)
    soft_at = silent_since + timeouts.soft_ns
    if now_ns < soft_at:
        return Judgement(Verdict.FINE, soft_at)
    why = f"{what} for {_seconds(timeouts.soft_ns)}"
    if not interrupted_ns:
        return Judgement(Verdict.SOFT, hard_at, why)
    stuck_at = _stuck_at(reading, interrupted_ns, main_is_running)
    if now_ns < stuck_at:
        return Judgement(Verdict.FINE, min(hard_at, stuck_at))
    return Judgement(Verdict.STUCK, hard_at, why)


def _last_sign(reading: Reading, interrupted_ns: int) -> tuple[int, str]:
    """Return since when the rank gives no sign of life, and what it does not do."""
    if reading.phase is not Phase.USER:
        # These have their time as a whole, whether they run or are blocked.
        return reading.since_ns, f"{reading.plugin.label} has not returned"
    asked = reading.bytecode_asked_ns or FAR_NS
    # Once interrupted, pings say nothing: the function is on its way out.
    pinged = reading.ping_ns if reading.ping_ns and not interrupted_ns else FAR_NS
    if asked <= pinged:
        return max(asked, reading.since_ns), "no Python code ran in its main thread"
    return max(pinged, reading.since_ns), "no ping"


def _stuck_at(reading: Reading, interrupted_ns: int, main_is_running: bool) -> int:
    grace = UNBLOCK_BUSY_NS if main_is_running else UNBLOCK_NS
    if reading.abort_ended_ns >= interrupted_ns:
        return reading.abort_ended_ns + grace
    if reading.abort_begun_ns >= interrupted_ns:
        # It may unblock the main thread any moment; the hard time-out bounds it.
        return FAR_NS
    return interrupted_ns + grace


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:g} s"
