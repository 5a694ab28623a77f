"""T: every time-out, in the order that they need: the cheapest remedy must be the first that acts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nvrx_slurm.doctor.findings import Answer, Finding, Status, ok, unknown
from nvrx_slurm.doctor.words import duration
from nvrx_slurm.slurm import SiteConfig

TORCH_NCCL_TIMEOUT_S = 600.0
"""What init_process_group sets for NCCL when nobody says otherwise."""


@dataclass(frozen=True)
class OwnTimes:
    """What this project fixes by itself."""

    keep_alive_s: float
    """A node that is silent for this long is lost."""
    cut_off_s: float
    """A node that hears nothing for this long kills its own ranks."""
    stop_margin_s: float
    """A node must have stopped its ranks this long after ``--workers-stop-timeout``."""


@dataclass(frozen=True)
class JobTimes:
    """What the job's options say; infinity is no limit, None is not known."""

    heartbeat_s: float | None
    initial_heartbeat_s: float | None
    workers_stop_s: float | None
    process_group_s: float | None = None
    """None: torch's default."""
    longest_step_s: float | None = None
    hard_s: float | None = None
    """In-process restart's; None: not used."""
    time_limit_s: float | None = None
    signal_s: float | None = None
    """``sbatch --signal``: how long before the time limit."""


@dataclass(frozen=True)
class Timeout:
    """One rung of a ladder."""

    rule: str
    name: str
    seconds: float | None
    origin: str
    """Where the value comes from."""
    why: str = ""
    """What happens if it is not below the next one."""
    fix: str = ""
    gravity: Status = Status.WARN
    may_equal: bool = False


@dataclass(frozen=True)
class Ladder:
    """Time-outs of which each must be smaller than the next; only the last may be no limit."""

    title: str
    rungs: tuple[Timeout, ...]

    def findings(self) -> list[Finding]:
        """Return one finding for every rung that has a next one."""
        pairs = zip(self.rungs, self.rungs[1:], strict=False)
        return [Finding(lower.rule, lower.name, _compare(lower, upper)) for lower, upper in pairs]


def _compare(lower: Timeout, upper: Timeout) -> Answer:
    said = f"{say(lower)} < {upper.name} {say(upper)}"
    if lower.seconds is None or upper.seconds is None:
        return unknown(said)
    fits = lower.seconds < upper.seconds or (lower.may_equal and lower.seconds == upper.seconds)
    if fits and not math.isinf(lower.seconds):
        return ok(said)
    return Answer(lower.gravity, said, lower.why, lower.fix)


def say(timeout: Timeout) -> str:
    """Return the value as a person writes it, ``?`` when it is not known."""
    return "?" if timeout.seconds is None else duration(timeout.seconds)


def ladders(job: JobTimes, own: OwnTimes, site: SiteConfig | None) -> list[Ladder]:
    """Return every ladder that the job has."""
    found = [_hang(job), _lost_node(own, site), *_stop(job, own, site)]
    return [*found, _time_limit(job)] if job.signal_s is not None else found


def _hang(job: JobTimes) -> Ladder:
    step = Timeout(
        "T1",
        "longest step",
        job.longest_step_s,
        "--longest-step",
        "a healthy step is taken for a hang, again and again",
        "init_process_group(timeout=…) above the longest step, checkpoint and first compilation included",
        Status.PROBLEM,
    )
    group = Timeout(
        "T2",
        "process group",
        job.process_group_s or TORCH_NCCL_TIMEOUT_S,
        "--process-group-timeout" if job.process_group_s else "torch's default, NCCL",
        "ranks are killed before NCCL's watchdog has said which collective hangs",
        "raise --heartbeat-timeout, or lower init_process_group(timeout=…)",
    )
    rungs = [step, group]
    if job.hard_s is not None:
        fix = "raise --heartbeat-timeout, or lower the Wrapper's hard_timeout"
        why = "the rank's agent restarts all ranks before in-process restart could heal them"
        rungs.append(Timeout("T3", "in-process hard", job.hard_s, "--hard-timeout", why, fix))
    rungs += [
        _heartbeat(job),
        Timeout(
            "T5",
            "first heartbeat",
            job.initial_heartbeat_s,
            "--initial-heartbeat-timeout",
            "a rank that hangs at the start holds the whole allocation until the time limit",
            "lower --initial-heartbeat-timeout below the job's --time",
        ),
    ]
    if job.time_limit_s is not None:
        rungs.append(Timeout("", "time limit", job.time_limit_s, "--time"))
    return Ladder("a rank hangs", tuple(rungs))


def _heartbeat(job: JobTimes) -> Timeout:
    why = "the first step, which compiles and loads, has less time than all others"
    fix = "raise --initial-heartbeat-timeout"
    if job.heartbeat_s is not None and math.isinf(job.heartbeat_s):
        why, fix = "a rank that hangs later than at the start is never found", "--heartbeat-timeout 45m"
    return Timeout("T4", "heartbeat", job.heartbeat_s, "--heartbeat-timeout", why, fix, may_equal=True)


def _lost_node(own: OwnTimes, site: SiteConfig | None) -> Ladder:
    lost = Timeout(
        "T6",
        "keep-alive",
        own.keep_alive_s,
        "fixed",
        "a node kills its ranks before the job has noticed that it is lost",
        "use one release of this package on all nodes",
        may_equal=True,
    )
    why = "Slurm takes the node away before the job has noticed that it is lost"
    cut_off = Timeout("T7", "cut-off node", own.cut_off_s, "fixed", why, "slurm.conf: SlurmdTimeout=120")
    return Ladder("a node is lost", (lost, cut_off, _of_site(site, "SlurmdTimeout", zero_is_none=True)))


def _stop(job: JobTimes, own: OwnTimes, site: SiteConfig | None) -> list[Ladder]:
    stop = Timeout(
        "T8",
        "SIGTERM to SIGKILL",
        job.workers_stop_s,
        "--workers-stop-timeout",
        "a node that is only slow to stop is taken for lost",
        "lower --workers-stop-timeout",
        Status.PROBLEM,
    )
    node = None if job.workers_stop_s is None else job.workers_stop_s + own.stop_margin_s
    restart = Ladder(
        "ranks stop for a restart", (stop, Timeout("", "node stopped", node, "the above + margin"))
    )
    at_end = replace(
        stop,
        rule="T9",
        why="scancel and the time limit kill ranks that are still saving",
        fix="lower --workers-stop-timeout; or slurm.conf: KillWait above it",
        gravity=Status.WARN,
    )
    kill_wait = replace(
        _of_site(site, "KillWait"),
        rule="T10",
        why="nodes are drained with 'Kill task failed' although their processes had time left to end",
        fix="slurm.conf: UnkillableStepTimeout=180",
        gravity=Status.PROBLEM,
    )
    end = Ladder("the job is stopped", (at_end, kill_wait, _of_site(site, "UnkillableStepTimeout")))
    return [restart, end]


def _time_limit(job: JobTimes) -> Ladder:
    stop = Timeout(
        "T11",
        "SIGTERM to SIGKILL",
        job.workers_stop_s,
        "--workers-stop-timeout",
        "ranks that are asked to save at the last moment have no time left for it",
        "raise the seconds after @ in --signal: the longest step, a checkpoint, and this",
    )
    fix = "lower the seconds after @ in --signal, or raise --time"
    why = "the job is asked to stop as soon as it starts"
    notice = Timeout("T12", "notice", job.signal_s, "--signal", why, fix, Status.PROBLEM)
    limit = Timeout("", "time limit", job.time_limit_s, "--time")
    return Ladder("the time limit comes", (stop, notice, limit))


def _of_site(site: SiteConfig | None, name: str, *, zero_is_none: bool = False) -> Timeout:
    seconds = None if site is None else site.number(name)
    value = math.inf if zero_is_none and seconds == 0 else seconds
    return Timeout("", name, None if value is None else float(value), "slurm.conf")
