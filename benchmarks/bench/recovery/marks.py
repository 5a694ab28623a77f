"""What the workers wrote down, and the phases of a recovery that follow from it: values in, values out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.journal import CycleStarted, FaultDetected, Record, WorkersStopped

METRICS = (
    "total",
    "restart",
    "until_start",
    "detect",
    "stop",
    "form",
    "start",
    "import",
    "rendezvous",
    "load",
    "first_step",
)
"""In the order in which they are shown. ``until_start`` is the sum of detect, stop, form and start;
``restart`` is that and ``import``: until the user's code runs again on every rank, all imports done."""


@dataclass(frozen=True)
class Process:
    """One rank process: who it is, and when it got how far; None: never."""

    rank: int
    world: int
    node: str
    pid: int
    """As its node sees it."""
    pid_ns: str
    main: float
    """First line of Python."""
    imported: float | None = None
    process_group: float | None = None
    loaded: float | None = None
    resumed_at: int = 0
    """Step of the checkpoint that it loaded, 0 if there was none."""
    first_step: float | None = None
    last_step: int = 0
    last_mark: float = 0.0
    """When it was last heard of."""


def read_processes(folder: Path) -> list[Process]:
    """Return every process that has marked its first line in ``folder``."""
    found = (parse_process(path.read_text().splitlines()) for path in folder.glob("*.jsonl"))
    return [process for process in found if process is not None]


def parse_process(lines: Iterable[str]) -> Process | None:
    """Return the process of one file; None before it has a whole line. A torn last line does not count."""
    identity: dict[str, object] | None = None
    times: dict[str, float] = {}
    resumed_at = last_step = 0
    last_mark = 0.0
    for line in lines:
        try:
            mark = json.loads(line)
        except json.JSONDecodeError:
            break
        phase = mark["mark"]
        if phase == "main":
            identity = mark
        elif phase == "loaded":
            resumed_at = mark["step"]
        elif phase == "step":
            last_step = mark["step"]
        last_mark = mark["t"]
        times.setdefault(phase, last_mark)  # of the steps, the first
    if identity is None:
        return None
    return Process(
        rank=int(str(identity["rank"])),
        world=int(str(identity["world"])),
        node=str(identity["node"]),
        pid=int(str(identity["pid"])),
        pid_ns=str(identity["pid_ns"]),
        main=times["main"],
        imported=times.get("imported"),
        process_group=times.get("process_group"),
        loaded=times.get("loaded"),
        resumed_at=resumed_at,
        first_step=times.get("step"),
        last_step=last_step,
        last_mark=last_mark,
    )


def whole_group(processes: Iterable[Process], after: float) -> list[Process] | None:
    """Return the first group that was started after that moment and in which every rank has done a step.

    Ordered by rank. A launcher may try more than once, and with fewer ranks than before: attempts in which
    some rank never got to a step are passed over. None: there is no such group yet.
    """
    candidates = [p for p in processes if p.main > after and p.first_step is not None]
    groups = []
    for world in {p.world for p in candidates}:
        first: dict[int, Process] = {}
        for process in sorted((p for p in candidates if p.world == world), key=lambda p: p.first_step or 0.0):
            first.setdefault(process.rank, process)
        if len(first) == world:
            groups.append([first[rank] for rank in range(world)])
    return min(groups, key=lambda group: max(p.first_step or 0.0 for p in group), default=None)


def running_group(processes: Iterable[Process], world: int, steps: int) -> list[Process] | None:
    """Return the newest process of each of ``world`` ranks once all have done that many steps, else None."""
    newest: dict[int, Process] = {}
    for process in sorted(processes, key=lambda p: p.main):
        newest[process.rank] = process
    done = [p for p in newest.values() if p.world == world and p.last_step - p.resumed_at >= steps]
    return done if len(done) == world else None


@dataclass(frozen=True)
class JournalTimes:
    """What only our own launcher tells."""

    fault_detected: float
    workers_stopped: float
    cycle_started: float


def journal_times(records: Sequence[Record], after: float) -> JournalTimes | None:
    """Return when the first restart after that moment was where; None if the journal has no whole one."""

    def first(kind: type, since: float) -> float | None:
        return next((r.ts for r in records if isinstance(r.event, kind) and r.ts >= since), None)

    detected = first(FaultDetected, after)
    stopped = first(WorkersStopped, detected) if detected is not None else None
    started = first(CycleStarted, stopped) if stopped is not None else None
    if detected is None or stopped is None or started is None:
        return None
    return JournalTimes(detected, stopped, started)


def phases(killed_at: float, group: Sequence[Process], journal: JournalTimes | None) -> dict[str, float]:
    """Return the seconds of each metric, for those that can be known.

    A phase ends when the last rank has reached its end, so those of one recovery add up to its total.
    """

    def last(times: Iterable[float | None]) -> float:
        return max(time for time in times if time is not None)

    main = last(p.main for p in group)
    ends = {
        "import": last(p.imported for p in group),
        "rendezvous": last(p.process_group for p in group),
        "load": last(p.loaded for p in group),
        "first_step": last(p.first_step for p in group),
    }
    seconds = {
        "total": ends["first_step"] - killed_at,
        "restart": ends["import"] - killed_at,
        "until_start": main - killed_at,
    }
    if journal is not None:
        seconds["detect"] = journal.fault_detected - killed_at
        seconds["stop"] = journal.workers_stopped - journal.fault_detected
        seconds["form"] = journal.cycle_started - journal.workers_stopped
        seconds["start"] = main - journal.cycle_started
    begin = main
    for phase, end in ends.items():
        seconds[phase] = end - begin
        begin = end
    return seconds
