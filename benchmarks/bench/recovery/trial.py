"""One trial: start a launcher, wait until it trains, break something, wait until it trains again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import psutil

from bench.recovery import contenders, faults, marks
from bench.recovery.contenders import WORLD, Contender, Place
from bench.recovery.faults import Case, FaultError
from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.journal import read_journal

SETTLED_STEPS = 20
"""So many steps on every rank, checkpoints among them, before the fault: start-up must not blur it."""
_POLL_S = 0.2  # of the marks' files; what is measured are the times in them
_STOP_S = 15.0
_TRIAL_VARIABLE = "BENCH_TRIAL"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Bounds:
    """How long a launcher may take; nothing waits longer."""

    start_s: float
    recovery_s: float
    deadline: float = float("inf")
    """Of everything, by time.monotonic()."""

    def within(self, seconds: float) -> float:
        return min(time.monotonic() + seconds, self.deadline)


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    case: Case
    who: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Per metric; empty: it did not recover, or was not measured."""
    why_not: str = ""
    measured: bool = True
    """False: the fault never happened, so nothing is known about recovery."""
    left_behind: int = 0
    """Launchers and ranks that were still there after Slurm had ended the job."""
    load: float = 0.0
    """Load average of the machine before the trial."""

    @property
    def recovered(self) -> bool:
        return bool(self.seconds)


@dataclass(frozen=True)
class Launch:
    """A running launcher and its log."""

    process: subprocess.Popen[bytes]
    log: Path
    job_name: str


def run_trial(
    case: Case, contender: Contender, place: Place, cluster: DevCluster, bounds: Bounds, jitter_s: float
) -> Outcome:
    """Run one trial from allocation to clean nodes.

    Args:
        jitter_s: waited before the fault, so that it does not always meet the same point of a poll.

    Raises:
        DevClusterError: the cluster failed, not the contender.
    """
    place.marks.mkdir(parents=True)
    with _all_nodes_again(cluster, place):
        try:
            with _launched(contender, place, cluster) as launch:
                outcome = _break_and_wait(case, contender, place, cluster, bounds, jitter_s, launch)
        finally:
            left_behind = _kill_leftovers(place)
    return replace(outcome, left_behind=left_behind)


def _break_and_wait(
    case: Case,
    contender: Contender,
    place: Place,
    cluster: DevCluster,
    bounds: Bounds,
    jitter_s: float,
    launch: Launch,
) -> Outcome:
    def settled() -> list[marks.Process] | None:
        return marks.running_group(marks.read_processes(place.marks), WORLD, SETTLED_STEPS)

    running = _wait(settled, launch, bounds.within(bounds.start_s))
    if not running:
        why = _explain(launch, f"did not train within {bounds.start_s:g} s")
        return Outcome(case, contender.who, why_not=why, measured=False)
    time.sleep(jitter_s)
    try:
        victim = faults.pick_victim(running, keep=place.nodes[0])
        struck_at = faults.strike(case, victim, cluster)
    except FaultError as error:
        return Outcome(case, contender.who, why_not=str(error), measured=False)

    def recovered() -> list[marks.Process] | None:
        return marks.whole_group(marks.read_processes(place.marks), after=struck_at)

    until = bounds.within(bounds.recovery_s)
    group = _wait(recovered, launch, until)
    waited = time.time() - struck_at
    if not group and launch.process.poll() is None and waited < bounds.recovery_s - 1.0:
        why = f"there was no time left to wait longer than {waited:.0f} s for it"
        return Outcome(case, contender.who, why_not=why, measured=False)
    if not group:
        return Outcome(case, contender.who, why_not=_explain(launch, f"not back within {waited:.0f} s"))
    if min(process.resumed_at for process in group) == 0:
        return Outcome(case, contender.who, why_not="began again at step 0 instead of its checkpoint")
    journal = place.run_dir / "journal.jsonl"
    times = marks.journal_times(read_journal(journal), struck_at) if journal.exists() else None
    return Outcome(
        case, contender.who, marks.phases(known_from(case, struck_at, victim, place), group, times)
    )


def known_from(case: Case, struck_at: float, victim: marks.Process, place: Place) -> float:
    """Return when a launcher could know of the fault: of a hang, when the victim's time-out has passed."""
    if case.heartbeat_s is None:
        return struck_at
    same = (victim.pid_ns, victim.pid)
    found = next(p for p in marks.read_processes(place.marks) if (p.pid_ns, p.pid) == same)
    return found.last_mark + case.heartbeat_s


def _wait(condition: Callable[[], _Answer], launch: Launch, until: float) -> _Answer:
    """Return what ``condition`` gives once that is true; its last answer when time or launcher has ended."""
    while True:
        ended = launch.process.poll() is not None or time.monotonic() > until
        answer = condition()
        if answer or ended:
            return answer
        time.sleep(_POLL_S)


def _explain(launch: Launch, otherwise: str) -> str:
    code = launch.process.poll()
    what = otherwise if code is None else f"ended with exit code {code}"
    said = telling_line(launch.log.read_text(errors="replace"))
    return f"{what}; it said: {said}" if said else what


def telling_line(log: str) -> str:
    """Return the last line that names an error, else the last one, cut to a readable length.

    What Slurm says about it comes later and tells less.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-^\t")]
    lines = [line for line in lines if not line.startswith(("srun: ", "salloc: "))] or lines
    errors = [line for line in lines if "Error" in line or "error:" in line]
    line = (errors or lines or [""])[-1]
    return line if len(line) <= 200 else f"{line[:199]}…"


@contextlib.contextmanager
def _launched(contender: Contender, place: Place, cluster: DevCluster) -> Iterator[Launch]:
    """Start the launcher in an allocation; at the end Slurm ends the job, whatever its state."""
    job_name = f"bench-{place.directory.name}"
    log = place.directory / "log"
    environ = contenders.environment(contender, place, cluster.environment())
    environ[_TRIAL_VARIABLE] = str(place.directory)
    with log.open("wb") as output:
        process = subprocess.Popen(
            contenders.allocation(contender, place, job_name),
            env=environ,
            cwd=place.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Launch(process, log, job_name)
    finally:
        _end(process, job_name, environ)


def _end(process: subprocess.Popen[bytes], job_name: str, environ: Mapping[str, str]) -> None:
    cancel = ["scancel", f"--jobname={job_name}"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(cancel, env=dict(environ), stderr=subprocess.DEVNULL, timeout=_STOP_S, check=False)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _kill_leftovers(place: Place) -> int:
    """Kill what is left of this trial once Slurm has ended its job; return how many launchers and ranks.

    They would take the processor from the next trial. Every process of a trial inherits its variable. An
    srun that waits for the end of a lost node is Slurm's matter: it does not count.
    """
    patience = time.monotonic() + 8.0  # Slurm's KillWait is 5 s
    while (left := _processes_of(place)) and time.monotonic() < patience:
        time.sleep(_POLL_S)
    count = 0
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            count += process.name() != "srun"
            process.kill()
    psutil.wait_procs(left, timeout=_STOP_S)
    return count


def _processes_of(place: Place) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_TRIAL_VARIABLE) == str(place.directory):
                found.append(process)
    return found


@contextlib.contextmanager
def _all_nodes_again(cluster: DevCluster, place: Place) -> Iterator[None]:
    """Boot at the end what was switched off, unless something went wrong and the cluster is going anyway."""
    yield
    for node in place.nodes:
        cluster.restore_node(node)
