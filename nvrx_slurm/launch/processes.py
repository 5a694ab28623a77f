"""The processes of one launcher, and what its own signals and exit code are to them.

::

    nvrx-launch            waits; passes signals on; ends with the job's exit code
    ├─ nvrx-coord          the Coordinator, on one node; survives its launcher and its node's agent
    └─ nvrx-guardian       as under nvrx-srun, with agent and ranks below; dies with its launcher

Everything is forked before the first thread exists.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from nvrx_slurm import linux
from nvrx_slurm.agent.failed_program import exit_now

EXIT_FAILED = 1
_DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class CannotCoordinateError(RuntimeError):
    """The Coordinator did not come up; the message says why."""


@dataclass(frozen=True)
class Coordinator:
    """A Coordinator's process, and the port on which it listens."""

    pid: int
    port: int


def start_coordinator(coordinate: Callable[[Callable[[int], None]], int]) -> Coordinator:
    """Run ``coordinate`` in a process of its own; return once it listens.

    It is given a function that it calls with its port, and returns the job's exit code. An exception of it is
    told as one sentence.

    Raises:
        CannotCoordinateError: it has ended, or failed, before it listened.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _become_coordinator(coordinate, writer)
    os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as said:
        answer = said.read().strip()
    if answer.isdecimal():
        return Coordinator(pid, int(answer))
    os.waitpid(pid, 0)
    raise CannotCoordinateError(answer or "the Coordinator ended as soon as it was started")


def _become_coordinator(coordinate: Callable[[Callable[[int], None]], int], writer: int) -> NoReturn:
    # A Ctrl-C is for the launcher, which passes it on.
    os.setsid()
    linux.set_process_name("nvrx-coord")
    told = False

    def tell(what: str) -> None:
        nonlocal told
        if not told:
            told = True
            os.write(writer, what.encode(errors="replace"))
            os.close(writer)

    code = EXIT_FAILED
    try:
        code = coordinate(lambda port: tell(str(port)))
    except Exception as error:
        if told:
            traceback.print_exc()
        tell(f"{error}"[:2000] or repr(error))
    finally:
        exit_now(code)


def start_guardian(run: Callable[[], int]) -> int:
    """Run ``run``, a guardian, in a process of its own that dies with this one; return its process id."""
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_FAILED
    try:
        os.setsid()
        # The agent then sees the guardian go, and stops in good order.
        linux.die_with_parent(signal.SIGKILL, launcher)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        exit_now(code)


def wait_for_job(guardian: int, coordinator: Coordinator | None, signals: Sequence[signal.Signals]) -> int:
    """Wait for the end of all that runs here, passing signals on; return the launcher's exit code.

    Where the Coordinator is, ``signals`` ask the whole job to stop, and SIGUSR1 and SIGUSR2 ask the ranks to
    save and end; elsewhere ``signals`` ask this node to go, and the other two mean nothing.
    """
    running = {guardian} | ({coordinator.pid} if coordinator else set())

    def forward(received: int, _frame: types.FrameType | None) -> None:
        to = coordinator.pid if coordinator is not None and coordinator.pid in running else guardian
        if to in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(to, received)

    for sig in signals:
        # nohup(1) has SIGHUP ignored, and means it.
        if signal.getsignal(sig) is not signal.SIG_IGN:
            signal.signal(sig, forward)
    for sig in set(_DRAIN_SIGNALS) - set(signals):
        signal.signal(sig, signal.SIG_IGN if coordinator is None else forward)
    codes: dict[int, int] = {}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if coordinator is not None and pid == coordinator.pid and guardian in running:
            # An agent that had not reached it yet would go on trying.
            os.kill(guardian, signal.SIGTERM)
    return _exit_code(codes[guardian], None if coordinator is None else codes[coordinator.pid])


def _exit_code(guardian: int, coordinator: int | None) -> int:
    if coordinator is None:
        return guardian if guardian >= 0 else 128 - guardian
    if coordinator < 0:
        name = signal.Signals(-coordinator).name
        print(f"nvrx-launch: the Coordinator was killed by {name}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return coordinator
