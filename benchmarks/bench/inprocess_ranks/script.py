"""Runs ranks of in-process restart: imports torch once, and forks the ranks of each scenario.

Reads one JSON request per line from standard input and answers each with one line: for every rank its exit
code and the events that it reported. Ranks that are still there when the time is over are killed, and the
answer says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.ports import free_port
from nvrx_slurm import linux
from nvrx_slurm.inprocess import (
    Compose,
    abort,
    completion,
    finalize,
    health_check,
    initialize,
    rank_assignment,
    terminate,
)
from nvrx_slurm.inprocess.link import Link
from nvrx_slurm.inprocess.monitor_thread import MonitorThread, RankShouldRestart
from nvrx_slurm.inprocess.store import FileStore, StoreMixin
from nvrx_slurm.inprocess.wrap import CallWrapper, Wrapper

_C = ctypes.CDLL(None)
_C_WITH_GIL = ctypes.PyDLL(None)


class Report:
    """What a rank tells the test."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w")

    def __call__(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n")
        self._file.flush()


class TwoArguments(Exception):
    """Can't be copied or pickled: needs two arguments, and holds a lock."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.lock = threading.Lock()


class Unreadable(Exception):
    """Whatever is asked of it raises, and its text has no UTF-8."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)

    def __str__(self) -> str:
        return "\ud800"


class Untellable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


# --- faults ---------------------------------------------------------------------------------------------


def _swallow(call: CallWrapper, report: Report) -> None:
    """A function that swallows whatever interrupts it, three times."""
    caught = 0
    while caught < 3:
        try:
            while True:
                time.sleep(0.001)
        except BaseException:
            caught += 1
    report("swallowed", times=caught)
    while True:
        time.sleep(0.001)


def _in_del(call: CallWrapper, report: Report) -> None:
    """Is interrupted in a ``__del__`` most of the time."""

    class Slow:
        def __del__(self) -> None:
            until = time.monotonic() + 0.04
            while time.monotonic() < until:
                pass

    while True:
        Slow()


def inject(
    kind: str, call: CallWrapper | None, report: Report, rank: int, iteration: int, point: str = "function"
) -> None:
    """Do what the plan asks of this rank."""
    report("fault", kind=kind, iteration=iteration, point=point)
    match kind:
        case "exception":
            raise ValueError(f"injected on {rank}")
        case "uncopyable":
            raise TwoArguments("can't", "be copied")
        case "unreadable":
            raise Unreadable
        case "untellable":
            raise Untellable
        case "fork":
            _fork(report)
        case "suspend":
            _suspend_all()
        case "descriptors":
            _use_up_descriptors()
        case "restart":
            raise RankShouldRestart("the function asks for it")
        case "exit":
            raise SystemExit(3)
        case "keyboard":
            raise KeyboardInterrupt
        case "abort":
            raise initialize.RestartAbort("enough")
        case "sigkill" | "sigterm" | "sigint":
            os.kill(os.getpid(), signal.Signals[kind.upper()])
            time.sleep(60)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segfault":
            faulthandler.disable()
            ctypes.string_at(0)
        case "livelock":
            if call is not None:
                call.ping()
            while True:
                time.sleep(0.001)
        case "block":
            _C.pause()
        case "block_briefly":
            _C.usleep(900_000)
            while True:
                time.sleep(0.001)
        case "gil":
            _C_WITH_GIL.pause()
        case "hub":
            _kill_supervisor_of(0)
        case "supervisor":
            _kill_supervisor_of(rank)
        case "supervisor_stops":
            _kill_supervisor_of(rank, signal.SIGSTOP)
        case _:
            raise AssertionError(kind)


def _suspend_all() -> None:
    """Stop all processes of all ranks for 4.5 s, as ``scontrol suspend`` does; then fail."""
    pids = []
    for name in ("supervisor", "rank"):
        for rank in range(int(os.environ["WORLD_SIZE"])):
            with open(_pidfile(rank, name)) as file:
                pids.append(file.read().strip())
    # Supervisors go on before their ranks: that is the harder order.
    everybody = " ".join(pids)
    commands = f"kill -STOP {everybody}; sleep 4.5; kill -CONT {everybody}"
    subprocess.run(["sh", "-c", commands], check=True)
    raise ValueError("after the job was suspended")


def _use_up_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    opened = []
    while True:
        # Closed with this frame.
        opened.append(open("/dev/null"))  # noqa: SIM115


def _fork(report: Report) -> None:
    """Have a forked process leave the function by an exception, then raise one here, too."""
    child = os.fork()
    if child == 0:
        raise SystemExit(3)
    _, status = os.waitpid(child, 0)
    report("forked", exit=os.waitstatus_to_exitcode(status))
    raise ValueError("injected after the fork")


def _signal_supervisor_of(rank: int, number: signal.Signals) -> None:
    with open(_pidfile(rank)) as file:
        os.kill(int(file.read()), number)


def _kill_supervisor_of(rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    _signal_supervisor_of(rank, number)
    while True:
        time.sleep(0.001)


def _pidfile(rank: int | str, name: str = "supervisor") -> str:
    return f"{os.environ['SCENARIO_DIR']}/{name}_{rank}.pid"


# --- plug-ins that fail as the plan says ----------------------------------------------------------------


class Failing:
    """Fails in the iterations and on the rank that the plan names."""

    def __init__(self, name: str, plan: dict[str, Any], report: Report) -> None:
        self.name, self.report = name, report
        self.at = {tuple(at) for at in plan.get(f"fail_{name}", ())}
        self.is_transient = plan.get("transient", False)
        self.hangs_at = {tuple(at) for at in plan.get(f"hang_{name}", ())}
        self.hang_s = plan.get("hang_s", 3600.0)
        self.returns_nothing_at = {tuple(at) for at in plan.get(f"nothing_{name}", ())}

    def __call__(self, state: Any) -> Any:
        who = getattr(state, "state", state)
        self.report(
            self.name, iteration=who.iteration, mode=who.mode.name, exception=type(who.fn_exception).__name__
        )
        here = (who.iteration, who.initial_rank)
        if here in self.at:
            if self.is_transient:
                self.at.discard(here)
            raise ValueError(f"{self.name} fails")
        if here in self.hangs_at:
            _C.usleep(int(self.hang_s * 1e6))
        return None if here in self.returns_nothing_at else state


class FailingInitialize(Failing, initialize.Initialize): ...


class FailingAbort(Failing, abort.Abort): ...


class FailingFinalize(Failing, finalize.Finalize): ...


class FailingHealthCheck(Failing, health_check.HealthCheck): ...


class FailingAssignment(Failing, rank_assignment.RankAssignment): ...


class FailingCompletion(Failing, completion.Completion): ...


class FailingTerminate(Failing, terminate.Terminate): ...


# --- scenarios ------------------------------------------------------------------------------------------


def wrapper_for(plan: dict[str, Any], report: Report) -> Wrapper:
    """Make the wrapper of a plan: short time-outs, and plug-ins that report."""
    times = {
        "soft_timeout": 30.0,
        "hard_timeout": 40.0,
        "heartbeat_timeout": 20.0,
        "barrier_timeout": 50.0,
        "completion_timeout": 50.0,
        "termination_grace_time": 1.0,
        **plan.get("times", {}),
    }
    return Wrapper(
        initialize=Compose(
            initialize.RetryController(plan.get("max_iterations")),
            FailingInitialize("initialize", plan, report),
        ),
        abort=Compose(FailingAbort("abort", plan, report), abort.AbortTorchDistributed()),
        finalize=FailingFinalize("finalize", plan, report),
        health_check=FailingHealthCheck("health_check", plan, report),
        completion=FailingCompletion("completion", plan, report),
        terminate=FailingTerminate("terminate", plan, report),
        monitor_process_pidfile=_pidfile("{rank}"),
        **_assignment(plan, report),
        **{name: seconds(value) for name, value in times.items()},
        **{"store_kwargs": {"timeout": seconds(60)}, **plan.get("wrapper", {})},
    )


def _assignment(plan: dict[str, Any], report: Report) -> dict[str, Any]:
    if "active_world_size" in plan.get("wrapper", {}) or "granularity" in plan.get("wrapper", {}):
        return {}
    if plan.get("keeps_numbers"):
        failing = FailingAssignment("assignment", plan, report)
        return {"rank_assignment": Compose(failing, rank_assignment.ActivateAllRanks())}
    return {
        "rank_assignment": Compose(
            rank_assignment.ActivateAllRanks(),
            rank_assignment.ShiftRanks(),
            FailingAssignment("assignment", plan, report),
        )
    }


def make_group(call: CallWrapper, timeout_s: float = 30.0) -> None:
    store = dist.PrefixStore(f"group/{call.iteration}", call.store)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=seconds(timeout_s),
    )


def planned(plan: dict[str, Any], report: Report) -> None:
    """Call a function in which iteration by iteration the plan's ranks do what the plan says.

    ``plan["faults"]`` holds a list for each iteration: pairs of an initial rank and a kind. The iteration
    after the last one returns, after one all-reduce if there is a group. Meanwhile the others do
    ``plan["others"]``.
    """
    # What the interpreter collects by itself is not to be taken for the wrapper's.
    gc.disable()
    rank = int(os.environ["RANK"])
    others = plan.get("others", "python")

    def function(value: int, call: CallWrapper | None = None) -> str:
        assert call is not None
        last = call.last_restart
        report(
            "enter",
            iteration=call.iteration,
            rank=os.environ["RANK"],
            world_size=os.environ["WORLD_SIZE"],
            terminated=list(last.terminated_ranks) if last else [],
            records=[[record.rank, record.interruption.name] for record in last.records] if last else [],
            total=last.total_s if last else 0,
            phases=last.phases() if last else {},
            full_collections=gc.get_stats()[2]["collections"],
        )
        if others == "gloo":
            make_group(call, plan.get("group_s", 30.0))
        faults = dict(plan["faults"][call.iteration]) if call.iteration < len(plan["faults"]) else None
        if faults is None:
            if others == "gloo":
                one = torch.ones(1)
                dist.all_reduce(one)
                report("reduced", value=one.item())
                dist.destroy_process_group()
            return f"{value} from {os.environ['RANK']}"
        call.store.barrier(f"ready/{call.iteration}", int(os.environ["WORLD_SIZE"]), seconds(30))
        if faults.get(rank) == "node":
            report("fault", kind="node", iteration=call.iteration, point="function")
            _signal_node(plan["node"], signal.Signals[plan["node_gets"]])
        elif rank in faults:
            time.sleep(plan.get("pause", 0.03))
            inject(faults[rank], call, report, rank, call.iteration)
        wait_as(others, call, report)
        raise AssertionError("not reached")

    if rank in plan.get("ctrl_c_at_end", ()):
        _interrupt_once(MonitorThread, "join")
    try:
        result = wrapper_for(plan, report)(function)(plan.get("value", 7))
    finally:
        if rank in plan.get("wakes_supervisor", ()):
            _signal_supervisor_of(rank, signal.SIGCONT)
        if rank in plan.get("buriers", ()):
            _signal_node(plan["node"], signal.SIGKILL)
    report("returned", value=result)


def _interrupt_once(owner: type, name: str) -> None:
    """Have Ctrl-C come where that method is called first."""
    method = getattr(owner, name)

    def interrupted(*args: Any) -> Any:
        setattr(owner, name, method)
        signal.raise_signal(signal.SIGINT)
        return method(*args)

    setattr(owner, name, interrupted)


def _signal_node(node: list[int], number: int) -> None:
    """Do it to all processes of these ranks: supervisors first, so that nobody tells of anything."""
    for name in ("supervisor", "rank"):
        for rank in node:
            with contextlib.suppress(ProcessLookupError), open(_pidfile(rank, name)) as file:
                os.kill(int(file.read()), number)


def wait_as(others: str, call: CallWrapper, report: Report) -> None:
    match others:
        case "gloo":
            while True:
                dist.all_reduce(torch.ones(1))
        case "swallow":
            _swallow(call, report)
        case "del":
            _in_del(call, report)
        case _:
            while True:
                call.ping()
                time.sleep(0.001)


def manners(plan: dict[str, Any], report: Report) -> None:
    """Use what a call wrapper offers, in two calls of one wrapped function."""
    rank = int(os.environ["RANK"])
    wrapper = wrapper_for(plan, report)

    @wrapper
    def function(number: int, *, word: str, call: CallWrapper) -> tuple[int, str, int]:
        """What a user says of it."""
        if call.iteration == 0:
            with call.disable_hang_protection():
                _C.usleep(int(plan["silent"] * 1e6))
            report("unprotected", rank=rank)
            call.store.barrier("all have been silent", 2, seconds(30))
            if rank == 0:
                with call.atomic(), call.atomic():
                    call.store.set("inside", "1")
                    _C.usleep(300_000)
                    report("atomic_ends")
                while True:
                    time.sleep(0.001)
            call.store.get("inside")
            raise ValueError("while rank 0 is not to be interrupted")
        held.append(call)
        return number, word, call.iteration

    held: list[CallWrapper] = []
    report("result", value=function(1, word="one"))
    report("result", value=function(2, word="two"), name=function.__name__, text=function.__doc__)
    held[0].ping()
    threading.Thread(target=lambda: report("in_thread", error=_refusal(lambda: function(3, word="")))).start()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    report("with_group", error=_refusal(lambda: function(3, word="")))
    dist.destroy_process_group()


def behaviours(plan: dict[str, Any], report: Report) -> None:
    """Call functions one after the other, each for one thing that a user counts on."""
    rank = int(os.environ["RANK"])
    handlers = [list(logging.getLogger(name).handlers) for name in (None, "nvrx", "nvrx_slurm")]

    def broken_store(**settings: Any) -> None:
        raise ConnectionError("no store today")

    broken = type("Broken", (StoreMixin,), {"__init__": lambda self: broken_store()})
    report("no_store", error=_error(Wrapper(store_factory=broken)(lambda: None)))

    def slow_but_alive(call: CallWrapper) -> int:
        # Twice the soft time-out in all, and never silent for half of it.
        for _ in range(int(2 * plan["times"]["soft_timeout"] / 0.2)):
            call.ping()
            _C.usleep(200_000)
        call.store.set("of the first call", "")
        return call.iteration

    report("slow", value=wrapper_for(plan, report)(slow_but_alive)())

    def fails_unprotected(call: CallWrapper) -> int:
        if call.iteration == 0:
            with call.disable_hang_protection():
                raise ValueError("inside")
        if call.iteration == 1:
            # What an earlier iteration had off is on again.
            inject("livelock" if rank == 0 else "block_briefly", call, report, rank, 1)
        report("keys", there=call.store.check(["of the first call"]))
        return call.iteration

    report("protected", value=wrapper_for(plan, report)(fails_unprotected)())
    for fails in plan["fails"]:
        report("failed", error=_error(wrapper_for({**plan, **fails}, report)(lambda: "well")))
    report("nested", error=_error(wrapper_for(plan, report)(wrapper_for(plan, report)(lambda: "well"))))
    after = [list(logging.getLogger(name).handlers) for name in (None, "nvrx", "nvrx_slurm")]
    report("handlers", same=handlers == after)


def unassigned(plan: dict[str, Any], report: Report) -> None:
    """Assign numbers by which no rank would ever run the function."""
    for idle in (rank_assignment.ShiftRanks(), rank_assignment.ActiveWorldSizeDivisibleBy(2)):
        report("idle", error=_error(Wrapper(rank_assignment=idle)(lambda: "well")))


def _error(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except (Exception, initialize.RestartAbort) as error:
        return type(error).__name__


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def contended(plan: dict[str, Any], report: Report) -> None:
    """Have one thread wait in the store while the main thread uses it."""

    def function(call: CallWrapper) -> None:
        waiting = threading.Thread(target=lambda: report("came", value=call.store.get("late").decode()))
        waiting.start()
        for number in range(100):
            call.store.set(f"key{number}", "")
        report("set", alive=waiting.is_alive())
        call.store.set("late", "now")
        waiting.join()

    wrapper_for(plan, report)(function)()


def rejoining(plan: dict[str, Any], report: Report) -> None:
    """Kill the plan's ranks, and restart until there are as many as at first.

    Or end as soon as one waits in their place, if the plan says so (``ends``).
    """
    queued = f"{os.environ['SCENARIO_DIR']}/queued"
    wait_admitted = Link.wait_admitted

    def announced(link: Link) -> Any:
        with open(queued, "w"):
            return wait_admitted(link)

    Link.wait_admitted = announced  # type: ignore[method-assign]
    rank, all_ranks = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    store = {"file_name": f"{os.environ['SCENARIO_DIR']}/store", "world_size": -1}
    wrapper = wrapper_for(
        {**plan, "wrapper": {"store_factory": FileStore, "store_kwargs": store, "rejoin": True}}, report
    )

    def function(call: CallWrapper) -> str:
        size = os.environ["WORLD_SIZE"]
        report("enter", iteration=call.iteration, rank=os.environ["RANK"], world_size=size)
        if call.iteration == 0:
            call.store.barrier("all are in the function", int(size), seconds(30))
            if rank in plan["killed"]:
                inject("sigkill", call, report, rank, 0)
            while True:
                time.sleep(0.001)
        while plan.get("ends"):
            if os.path.exists(queued):
                return os.environ["RANK"]
            time.sleep(0.01)
        if size != all_ranks:
            # Whoever comes does not interrupt this.
            time.sleep(0.1)
            raise ValueError("until all are there again")
        make_group(call)
        one = torch.ones(1)
        dist.all_reduce(one)
        report("reduced", value=one.item())
        dist.destroy_process_group()
        return os.environ["RANK"]

    report("returned", value=wrapper(function)())


# --- chaos ----------------------------------------------------------------------------------------------


class Chaos:
    """Faults at any point of an iteration: what the plan has for this rank at that point, once."""

    def __init__(self, plan: dict[str, Any], report: Report, rank: int) -> None:
        self._report, self._rank = report, rank
        self._todo = {(it, point): (kind, delay) for it, r, point, kind, delay in plan["chaos"] if r == rank}
        self.call: CallWrapper | None = None

    def at(self, point: str, iteration: int) -> None:
        """Do what is planned."""
        planned = self._todo.pop((iteration, point), None)
        if planned is None:
            return
        kind, delay = planned
        if kind == "kill_later":
            # Wherever the rank is by then: in its plug-ins, in the barrier, in the assignment …
            self._report("fault", kind=kind, iteration=iteration, point=point)
            _C.setitimer(0, (ctypes.c_long * 4)(0, 0, 0, max(1, int(delay * 1e6))), None)
            return
        if kind == "interrupt_later":
            self._report("fault", kind=kind, iteration=iteration, point=point)
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
            return
        time.sleep(delay)
        inject(kind, self.call, self._report, self._rank, iteration, point)


class At:
    """Plug-in of any kind at which the plan may have a fault."""

    def __init__(self, chaos: Chaos, point: str) -> None:
        self._chaos, self._point = chaos, point

    def __call__(self, state: Any) -> Any:
        self._chaos.at(self._point, getattr(state, "state", state).iteration)
        return state


class InitializeAt(At, initialize.Initialize): ...


class AbortAt(At, abort.Abort): ...


class FinalizeAt(At, finalize.Finalize): ...


class HealthCheckAt(At, health_check.HealthCheck): ...


class AssignmentAt(At, rank_assignment.RankAssignment): ...


def chaotic(plan: dict[str, Any], report: Report) -> None:
    """Reduce in a gloo group for ``plan["duration"]`` seconds, in every iteration, while faults happen."""
    # SIGALRM kills: its default action.
    chaos = Chaos(plan, report, int(os.environ["RANK"]))

    def function(call: CallWrapper) -> str:
        chaos.call = call
        report(
            "enter", iteration=call.iteration, rank=os.environ["RANK"], world_size=os.environ["WORLD_SIZE"]
        )
        chaos.at("function", call.iteration)
        make_group(call, plan.get("group_s", 30.0))
        until = time.monotonic() + plan["duration"]
        is_over = torch.zeros(1)
        while not is_over.item():
            chaos.at("collective", call.iteration)
            call.ping()
            is_over[0] = float(time.monotonic() > until)
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
            with call.atomic():
                chaos.at("atomic", call.iteration)
        dist.destroy_process_group()
        chaos.at("end", call.iteration)
        return os.environ["RANK"]

    wrapper = Wrapper(
        store_kwargs={"timeout": seconds(60)},
        initialize=InitializeAt(chaos, "initialize"),
        abort=Compose(AbortAt(chaos, "abort"), abort.AbortTorchDistributed()),
        finalize=FinalizeAt(chaos, "finalize"),
        health_check=HealthCheckAt(chaos, "health_check"),
        rank_assignment=Compose(
            rank_assignment.ActivateAllRanks(),
            rank_assignment.ShiftRanks(),
            AssignmentAt(chaos, "assignment"),
        ),
        monitor_process_pidfile=_pidfile("{rank}"),
        **{name: seconds(value) for name, value in plan["times"].items()},
    )
    report("returned", value=wrapper(function)())


SCENARIOS = {
    "planned": planned,
    "manners": manners,
    "behaviours": behaviours,
    "unassigned": unassigned,
    "contended": contended,
    "chaotic": chaotic,
    "rejoining": rejoining,
}


# --- the server -----------------------------------------------------------------------------------------


def rank_main(request: dict[str, Any], rank: int, port: int, fd: int) -> int:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(request["world_size"]),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        SCENARIO_DIR=request["directory"],
        **request.get("env", {}),
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(_pidfile(rank, "rank"), "w") as file:
        file.write(str(os.getpid()))
    report = Report(fd)
    code = 1
    pid = os.getpid()
    try:
        SCENARIOS[request["scenario"]](request["plan"], report)
        code = 0
    except SystemExit as error:
        if os.getpid() != pid:
            os._exit(error.code)
        report("raised", type="SystemExit", text=str(error), cause="")
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        cause = error.__cause__
        report(
            "raised", type=type(error).__name__, text=str(error), cause=type(cause).__name__ if cause else ""
        )
        if request.get("verbose"):
            traceback.print_exc()
    # An abort leaves the taking apart of groups to a thread of its own.
    patience = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < patience:
        time.sleep(0.01)
    if code:
        # What the exception's frames held may be in cycles, and the plan may have switched collection off.
        gc.collect()
    report(
        "end",
        threads=sorted(thread.name for thread in threading.enumerate()),
        memfds=sum("nvrx-progress" in _target(fd) for fd in os.listdir("/proc/self/fd")),
        shm=sum("/dev/shm" in _target(fd) for fd in os.listdir("/proc/self/fd")),
        sockets=sum("socket:" in _target(fd) for fd in os.listdir("/proc/self/fd")),
    )
    return code


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@dataclass
class Child:
    """One rank's process."""

    rank: int
    pid: int
    reader: int
    text: bytes = b""
    code: int | None = None


def fork_rank(request: dict[str, Any], rank: int, port: int) -> Child:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            code = rank_main(request, rank, port, writer)
        finally:
            os._exit(code)
    os.close(writer)
    return Child(rank, pid, reader)


def run(request: dict[str, Any]) -> dict[str, Any]:
    port = free_port()
    children = [fork_rank(request, rank, port) for rank in range(request["world_size"])]
    deadline = time.monotonic() + request.get("timeout", 60)
    unread = {child.reader: child for child in children}
    hung: list[int] = []
    while unread:
        left = deadline - time.monotonic()
        if left <= 0:
            hung = sorted(child.rank for child in unread.values())
            break
        for reader in select.select(list(unread), [], [], left)[0]:
            child, data = unread[reader], os.read(reader, 65536)
            child.text += data
            if data:
                continue
            del unread[reader]
            if request["plan"].get("replace"):
                # It has nothing open any more, so it is about to be dead.
                child.code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
                if child.code < 0:
                    children.append(fork_rank(request, child.rank, port))
                    unread[children[-1].reader] = children[-1]
    by_pid = {child.pid: child for child in children if child.code is None}
    for pid in by_pid if hung else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Supervisors are adopted here: when all have gone, none has been left behind.
    left_behind = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid in by_pid:
            by_pid[pid].code = os.waitstatus_to_exitcode(status)
        elif pid == 0:
            if time.monotonic() > deadline + 10:
                left_behind = True
                linux_kill_children()
            time.sleep(0.002)
    for child in children:
        os.close(child.reader)
    return {
        "hung": hung,
        "left_behind": left_behind,
        "ranks": [
            {"exit": child.code, "events": [json.loads(line) for line in child.text.splitlines()]}
            for child in children
        ],
    }


def linux_kill_children() -> None:
    for pid in linux.children_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    linux.become_subreaper()
    logging.getLogger("nvrx_slurm").setLevel(logging.CRITICAL if "--quiet" in sys.argv else logging.INFO)
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
