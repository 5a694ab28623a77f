"""The agent's parent: kills what is left when the agent ends, however it ends.

The guardian does nothing but wait, so it is the last to fall over. If the agent is killed, the guardian kills
everything below it; if the agent stands still, the guardian kills it first (:mod:`nvrx_slurm.agent.pulse`);
if the guardian is killed, the kernel sends the agent SIGTERM and it stops in good order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from nvrx_slurm import linux
from nvrx_slurm.agent.failed_program import exit_now
from nvrx_slurm.agent.private_places import private_places, remove_places
from nvrx_slurm.agent.pulse import PulseWatch

ASKED_TO_GO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_guarded(
    agent: Callable[[], int], private_dir: Path, signals: Sequence[signal.Signals] = ASKED_TO_GO
) -> int:
    """Run ``agent`` in a child; return its exit code once no process below is left.

    Must be called before any thread exists. ``signals`` are passed on to the agent. ``private_dir``, and what
    the agent used instead, is removed at the end. They are blocked when it returns.
    """
    places = private_places(private_dir)
    linux.become_subreaper()
    guardian = os.getpid()
    # A signal that comes before it is waited for stays pending.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        linux.die_with_parent(signal.SIGTERM, guardian)
        linux.set_process_name("nvrx-agent")
        code = 1
        try:
            code = agent()
        except BaseException:
            traceback.print_exc()
        finally:
            if os.getppid() != guardian:
                # It was killed: nobody else clears up.
                linux.kill_descendants()
                remove_places(places)
            # Nothing of the guardian's stack may unwind in the child.
            exit_now(code)
    linux.set_process_name("nvrx-guardian")

    def forward(received: int, _frame: types.FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, received)

    for sig in signals:
        signal.signal(sig, forward)
    code = _wait_for(pid)
    # What comes now is for whoever comes after the agent.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for sig in signals:
        signal.signal(sig, signal.SIG_DFL)
    linux.kill_descendants()
    remove_places(places)
    return code


def _wait_for(pid: int) -> int:
    """Reap children, adopted orphans included, until ``pid`` has ended; return its shell-style exit code.

    Kills ``pid`` if it stands still. SIGCHLD is blocked.
    """
    watch = PulseWatch()
    stood_still = False
    while True:
        while (reaped := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if reaped[0] == pid:
                code = os.waitstatus_to_exitcode(reaped[1])
                if code < 0 and not stood_still:
                    _say(f"the agent was killed by {signal.Signals(-code).name}")
                return code if code >= 0 else 128 - code
        signal.sigtimedwait({signal.SIGCHLD}, watch.seconds_to_check())
        if watch.has_stopped():
            stood_still = True
            _say("the agent stands still: killed")
            os.kill(pid, signal.SIGKILL)


def _say(what: str) -> None:
    print(f"nvrx-guardian: {what}", file=sys.stderr, flush=True)
