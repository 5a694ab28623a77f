"""The parts of the engine of in-process restart that need no other process."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Optional

import pytest
import torch

from nvrx_slurm import linux
from nvrx_slurm.inprocess import (
    CallWrapper,
    Compose,
    Wrapper,
    abort,
    monitor_thread,
    rank_assignment,
    rendezvous,
    store,
)
from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.inprocess.exception_summary import exc_info
from nvrx_slurm.inprocess.injection import parameters_of_type
from nvrx_slurm.inprocess.monitor_thread import Interrupted, RankShouldRestart, UserCode
from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.deadlines import UNBLOCK_NS, Timeouts, Verdict, judge
from nvrx_slurm.supervisor.page import Phase, Reading

if TYPE_CHECKING:
    from somewhere import Unknown

S = 1_000_000_000
TIMEOUTS = Timeouts(soft_ns=10 * S, hard_ns=20 * S)


def reading(**fields: Any) -> Reading:
    values: dict[str, Any] = {
        "phase": Phase.USER,
        "bytecode_asked_ns": 0,
        "ping_ns": 0,
        "protected": True,
        "abort_begun_ns": 0,
        "abort_ended_ns": 0,
        "main_thread": 1,
        "since_ns": 100 * S,
    }
    return Reading(**{**values, **fields})


@pytest.mark.parametrize(
    ("fields", "now", "interrupted", "verdict"),
    [
        # No Python code for the soft time-out; a ping long ago, though code runs.
        ({"bytecode_asked_ns": 200 * S}, 209.9, 0, Verdict.FINE),
        ({"bytecode_asked_ns": 200 * S}, 210, 0, Verdict.SOFT),
        ({"bytecode_asked_ns": 209 * S, "ping_ns": 200 * S}, 210, 0, Verdict.SOFT),
        ({"bytecode_asked_ns": 209 * S, "ping_ns": 0}, 210, 0, Verdict.FINE),
        ({"bytecode_asked_ns": 200 * S}, 220, 0, Verdict.HARD),
        # Neither in the engine's own waits, nor without protection, nor from before the phase began.
        ({"bytecode_asked_ns": 1 * S, "phase": Phase.WAITING}, 300, 0, Verdict.FINE),
        ({"bytecode_asked_ns": 1 * S, "protected": False}, 300, 0, Verdict.FINE),
        ({"bytecode_asked_ns": 1 * S, "since_ns": 205 * S}, 210, 0, Verdict.FINE),
        # Interrupted: stuck only when the abort has ended, or never began, and a moment has passed.
        ({"bytecode_asked_ns": 200 * S}, 210.05, 210, Verdict.FINE),
        ({"bytecode_asked_ns": 200 * S}, 210.2, 210, Verdict.STUCK),
        ({"bytecode_asked_ns": 200 * S, "abort_begun_ns": 210 * S}, 211, 210, Verdict.FINE),
        (
            {"bytecode_asked_ns": 200 * S, "abort_begun_ns": 210 * S, "abort_ended_ns": 211 * S},
            211.2,
            210,
            Verdict.STUCK,
        ),
        # A long call that is not silent for the soft time-out yet is left alone.
        ({"bytecode_asked_ns": 209 * S}, 212, 210, Verdict.FINE),
        # It swallows every interruption, or hangs in finalize.
        ({"bytecode_asked_ns": 229 * S}, 230, 210, Verdict.HARD),
        ({"since_ns": 211 * S, "phase": Phase.RECOVERY}, 225, 210, Verdict.FINE),
        ({"since_ns": 211 * S, "phase": Phase.RECOVERY}, 231, 210, Verdict.HARD),
        # So does a plug-in that runs and runs, with or without an interruption.
        ({"since_ns": 211 * S, "phase": Phase.RECOVERY}, 231, 0, Verdict.HARD),
        ({"since_ns": 211 * S, "phase": Phase.START}, 220, 0, Verdict.FINE),
        ({"since_ns": 211 * S, "phase": Phase.START}, 221, 0, Verdict.SOFT),
        ({"since_ns": 211 * S, "phase": Phase.START}, 231, 221, Verdict.HARD),
    ],
)
def test_a_rank_is_judged_by_absolute_deadlines(
    fields: dict[str, Any], now: float, interrupted: float, verdict: Verdict
) -> None:
    """BUG-1"""
    judgement = judge(reading(**fields), TIMEOUTS, int(now * S), int(interrupted * S), False)
    assert judgement.verdict is verdict


def test_the_next_look_is_when_the_verdict_can_change() -> None:
    quiet = reading(bytecode_asked_ns=200 * S)
    assert judge(quiet, TIMEOUTS, 201 * S, 0, False).look_again_ns == 210 * S
    assert judge(quiet, TIMEOUTS, 210 * S, 0, False).look_again_ns == 220 * S
    assert judge(quiet, TIMEOUTS, 210 * S, 210 * S, False).look_again_ns == 210 * S + UNBLOCK_NS


def plain(a: int, call: CallWrapper) -> None: ...


def optional(call: Optional[CallWrapper] = None, other: CallWrapper | None = None) -> None: ...  # noqa: UP045


def others(
    a: list[int], b: Callable[[], int], c: dict[str, int], d: object, e: Unknown, f: CallWrapper
) -> None: ...


def strings(call: "CallWrapper", d: "object", e: "list[int]") -> None: ...  # noqa: UP037


def of_several(call: CallWrapper | int | None) -> None: ...


class Callee:
    def __call__(self, call: CallWrapper) -> None: ...

    def method(self, call: CallWrapper) -> None: ...


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (plain, ["call"]),
        (optional, ["call", "other"]),
        (others, ["f"]),
        (strings, ["call"]),
        (of_several, []),
        (functools.partial(plain, 1), ["call"]),
        (Callee(), ["call"]),
        (Callee().method, ["call"]),
        (print, []),
    ],
)
def test_the_call_wrapper_goes_where_the_annotation_says_so_exactly(
    function: Callable[..., Any], names: list[str]
) -> None:
    """BUG-8: annotations of any other kind are neither an error nor overwritten."""
    assert parameters_of_type(function, CallWrapper) == names


def test_an_interruption_lands_in_user_code_and_nowhere_else() -> None:
    """BUG-9: raised without pause by another thread, it never comes out of what runs the user's code."""
    user_code = UserCode()
    over = threading.Event()

    def raise_on() -> None:
        while not over.is_set():
            user_code.interrupt(RankShouldRestart)

    thread = threading.Thread(target=raise_on)
    # Other tests leave callbacks of the garbage collector, which could not raise what lands in them.
    gc.disable()
    thread.start()
    try:
        outcomes = []
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            outcomes.append(user_code.run(lambda: sum(range(50))))
            # Between two runs nothing may arrive.
            sum(range(50))
    finally:
        over.set()
        thread.join()
        gc.enable()
    assert any(isinstance(outcome, Interrupted) for outcome in outcomes)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"soft_timeout": 60}, TypeError, "soft_timeout"),
        ({"soft_timeout": timedelta(0)}, ValueError, "soft_timeout"),
        ({"soft_timeout": timedelta(seconds=90)}, ValueError, "soft_timeout < hard_timeout"),
        ({"hard_timeout": timedelta(seconds=120)}, ValueError, "hard_timeout < barrier_timeout"),
        ({"heartbeat_interval": timedelta(seconds=30)}, ValueError, "heartbeat_interval < heartbeat_timeout"),
        ({"store_factory": dict}, TypeError, "store_factory"),
        ({"store_factory": store.TCPStore.__init__}, TypeError, "store_factory"),
        ({"store_kwargs": ["port"]}, TypeError, "store_kwargs"),
        ({"abort": abort.AbortTorchDistributed}, TypeError, "abort"),
        ({"rank_assignment": None}, TypeError, "rank_assignment"),
        ({"monitor_process_logfile": "log"}, ValueError, "monitor_process_logfile"),
        ({"granularity": "rack"}, ValueError, "granularity"),
        ({"active_world_size": 0}, ValueError, "active_world_size"),
        ({"enabled": "yes"}, TypeError, "enabled"),
    ],
)
def test_what_the_wrapper_can_not_work_with_is_refused_at_once(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Wrapper(**arguments)


def test_a_rank_assignment_excludes_its_short_forms() -> None:
    own = Compose(rank_assignment.ActivateAllRanks(), rank_assignment.ShiftRanks())
    with pytest.raises(ValueError, match="together with granularity"):
        Wrapper(rank_assignment=own, granularity="node")


def test_a_wrapper_that_is_not_enabled_returns_the_function_itself() -> None:
    assert Wrapper(enabled=False)(plain) is plain


def test_what_nvidias_package_has_under_these_names_is_there() -> None:
    assert monitor_thread.RankShouldRestart is RankShouldRestart
    assert issubclass(store.BarrierTimeout, store.BarrierError)
    assert issubclass(store.BarrierOverflow, store.BarrierError)
    assert store.TCPStore.critical_ranks.fget is not None


class _Hosted:
    """A link whose supervisor runs hubs at any port."""

    def __init__(self) -> None:
        self.joined: list[msg.Join] = []

    def host(self, token: str, world_size: int, rejoin: bool) -> int:
        return 1234

    def join(self, addresses: object, join: msg.Join) -> None:
        self.joined.append(join)


def test_two_jobs_that_share_a_store_do_not_share_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same MASTER_PORT twice on one host: one is told so; and no secret is left for a third."""
    monkeypatch.setattr(rendezvous, "_calls", itertools.repeat(0))
    shared, link = torch.distributed.HashStore(), _Hosted()
    one = rendezvous.meet(link, shared, 0, 2, False)
    assert rendezvous.meet(link, shared, 1, 2, False) == one
    with pytest.raises(InternalError, match="same MASTER_PORT"):
        rendezvous.meet(link, shared, 0, 2, False)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    other = rendezvous.meet(link, shared, 0, 2, False)
    assert other.token != one.token
    for meeting in (one, other):
        rendezvous.close_meeting(shared, meeting)
        assert not shared.check([meeting.key])
    shared.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(store.BarrierTimeout, match="rank 1 waits for rank 0 in vain"):
        rendezvous.meet(link, shared, 1, 2, False)


def test_a_port_of_another_user_is_not_taken_for_the_jobs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        assert linux.listening_user(port) == os.geteuid()
        monkeypatch.setattr(linux, "listening_user", lambda port: os.geteuid() + 1)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(InternalError, match=f"port {port} of this host belongs to user"):
            store.TCPStore("localhost", port, 1)


def test_a_text_of_megabytes_does_not_go_into_the_log() -> None:
    _, error, _ = exc_info(ValueError("x" * 10_000_000))
    assert len(str(error)) < 1000
    assert str(error).startswith("ValueError: xxx")
    short = ValueError("x")
    assert exc_info(short) == (ValueError, short, None)
