"""S: what the site's Slurm does, and what of this project degrades with it."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.doctor.findings import Answer, Rules, ok, problem, unknown, warn
from nvrx_slurm.doctor.words import clean, duration
from nvrx_slurm.slurm import DiagnosisClient, SiteConfig, SlurmRelease, SlurmUnavailableError

OLDEST_TRIED = SlurmRelease(22, 5)
_EXPEDITE_SINCE = SlurmRelease(25, 11)
_LONGEST_SLURMD_TIMEOUT_S = 300
_SHORTEST_UNKILLABLE_S = 120
_NO_LIMIT_S = 65534
"""How releases before 23.02 write an unset PrologEpilogTimeout."""
_HOOK_S = 120
"""What `nvrx-health install-hooks` asks for: an epilog may take 97 s."""


@dataclass(frozen=True)
class Site:
    """What was read from Slurm."""

    config: SiteConfig | None
    """None: Slurm could not be asked."""
    answer: str
    """What ``scontrol ping`` said, or why Slurm could not be asked."""


def read_site(client: DiagnosisClient) -> Site:
    """Ask Slurm; one question that fails ends it, since each may wait for a time-out."""
    try:
        answer = client.ping()
        return Site(client.site_config(), clean(answer))
    except SlurmUnavailableError as error:
        return Site(None, clean(str(error)))


SITE = Rules[Site]()
"""Applied always."""
CONFIG = Rules[SiteConfig]()
"""Applied when Slurm could be asked."""

# What a failure to ask says about itself: a word in it, and what to do.
_CURES = (
    ("not installed", "run this where Slurm's commands are: a login or compute node"),
    ("munge", "start munged on this machine (systemctl status munge) with the cluster's munge.key"),
    ("credential", "set this machine's clock: munge refuses credentials from the past or the future"),
    ("configuration", "point SLURM_CONF at the cluster's slurm.conf, or run this on a node of the cluster"),
    ("slurm.conf", "point SLURM_CONF at the cluster's slurm.conf, or run this on a node of the cluster"),
    ("did not answer", "is SLURM_CONF right, and slurmctld reachable from here? scontrol ping"),
    ("down", "slurmctld is down: tell the site's administrators"),
)


@SITE.rule("S1", "slurmctld answers")
def slurmctld_answers(site: Site) -> Answer:
    if site.config is not None:
        return ok(site.answer)
    said = site.answer.lower()
    cure = next((cure for word, cure in _CURES if word in said), "try: scontrol ping")
    return unknown("could not be asked", f"{site.answer}. Nothing is known about the site.", cure)


@CONFIG.rule("S2", "Slurm's release")
def release(config: SiteConfig) -> Answer:
    version = config.text("SLURM_VERSION") or "?"
    if config.release is None:
        return unknown(version)
    if config.release < OLDEST_TRIED:
        why = f"releases before {OLDEST_TRIED} were never tried with nvrx-srun"
        return warn(version, why, "try a job that you can lose first")
    return ok(version)


@CONFIG.rule("S3", "AuthType")
def authentication(config: SiteConfig) -> Answer:
    kind = config.text("AuthType") or "?"
    return ok(f"{kind}, accepted just now")


@CONFIG.rule("S4", "JobRequeue")
def job_requeue(config: SiteConfig) -> Answer:
    match config.number("JobRequeue"):
        case None:
            return unknown("not shown")
        case 0:
            return warn(
                "0",
                "jobs are not requeued unless they ask: one that lost too many nodes is over",
                "sbatch --requeue",
            )
        case _:
            return ok("1")


def _overridden(config: SiteConfig, name: str, harmless: str, option: str) -> Answer:
    value = config.values.get(name)
    if value is None:
        return unknown("not shown")
    if value.partition(" ")[0] == harmless:
        return ok(value)
    return ok(value, f"nvrx-srun passes {option}; another srun in your script needs it, too")


@CONFIG.rule("S5", "KillOnBadExit")
def kill_on_bad_exit(config: SiteConfig) -> Answer:
    return _overridden(config, "KillOnBadExit", "0", "--kill-on-bad-exit=0")


@CONFIG.rule("S6", "WaitTime")
def wait_time(config: SiteConfig) -> Answer:
    return _overridden(config, "WaitTime", "0", "--wait=0")


@CONFIG.rule("S7", "MpiDefault")
def mpi_default(config: SiteConfig) -> Answer:
    return _overridden(config, "MpiDefault", "none", "--mpi=none")


@CONFIG.rule("S8", "ProctrackType")
def process_tracking(config: SiteConfig) -> Answer:
    kind = config.text("ProctrackType")
    if kind is None:
        return unknown("not shown")
    if "cgroup" in kind:
        return ok(kind)
    return warn(
        kind,
        "a program that a rank started and detached can outlive the job if agent and guardian are killed "
        "in the same instant",
        "slurm.conf: ProctrackType=proctrack/cgroup",
    )


@CONFIG.rule("S9", "SlurmdTimeout")
def slurmd_timeout(config: SiteConfig) -> Answer:
    seconds = config.number("SlurmdTimeout")
    if seconds is None:
        return unknown("not shown")
    if seconds == 0:
        return problem(
            "0",
            "a silent node is never declared DOWN: it stays in the allocation, and a requeued job waits for "
            "its completion without end",
            "slurm.conf: SlurmdTimeout=120",
        )
    if seconds > _LONGEST_SLURMD_TIMEOUT_S:
        return warn(
            duration(seconds),
            "nvrx-srun goes on after 4.5s, but a requeue waits until Slurm itself has given up a dead node",
            "slurm.conf: SlurmdTimeout=120",
        )
    return ok(duration(seconds))


@CONFIG.rule("S10", "UnkillableStepTimeout")
def unkillable_step_timeout(config: SiteConfig) -> Answer:
    seconds = config.number("UnkillableStepTimeout")
    if seconds is None:
        return unknown("not shown")
    if seconds < _SHORTEST_UNKILLABLE_S:
        return warn(
            duration(seconds),
            "GPU processes can take longer to die: good nodes are drained with 'Kill task failed'",
            "slurm.conf: UnkillableStepTimeout=180",
        )
    return ok(duration(seconds))


@CONFIG.rule("S11", "ReturnToService")
def return_to_service(config: SiteConfig) -> Answer:
    match config.number("ReturnToService"):
        case None:
            return unknown("not shown")
        case 0:
            return warn(
                "0",
                "a node that was silent once stays DOWN until an administrator resumes it: spares run out",
                "slurm.conf: ReturnToService=1",
            )
        case value:
            return ok(str(value))


@CONFIG.rule("S12", "MaxBatchRequeue")
def max_batch_requeue(config: SiteConfig) -> Answer:
    limit = config.number("MaxBatchRequeue")
    if limit is None:
        return ok(
            "not in this release", "after 5 failed launches Slurm holds a job; it can't be changed here"
        )
    if limit < 5:
        return warn(
            str(limit),
            f"after {limit} failed launches (a failing prolog counts) Slurm holds the job, and only an "
            "operator can release it",
            "slurm.conf: MaxBatchRequeue=20",
        )
    return ok(str(limit))


@CONFIG.rule("S13", "requeue_delay")
def requeue_delay(config: SiteConfig) -> Answer:
    delay = config.flag_value("SchedulerParameters", "requeue_delay")
    if delay is not None:
        return ok(f"{delay}s")
    why = "Slurm's own requeue waits 2 minutes; nvrx-srun's requeue does not"
    if config.release is None or config.release < _EXPEDITE_SINCE:
        return ok(f"not before Slurm {_EXPEDITE_SINCE}", why)
    return warn("not set", why, "slurm.conf: SchedulerParameters=…,requeue_delay=5")


@CONFIG.rule("S14", "expedited requeue")
def expedited_requeue(config: SiteConfig) -> Answer:
    if "enable_expedited_requeue" in (config.flags("SlurmctldParameters") or ()):
        return ok("enabled", "sbatch --requeue=expedite starts a job again in 0.1s after a hardware fault")
    if config.release is None or config.release < _EXPEDITE_SINCE:
        return ok(f"not before Slurm {_EXPEDITE_SINCE}")
    return warn(
        "not enabled",
        "a requeue after a hardware fault takes about 11s instead of 0.1s",
        "slurm.conf: SlurmctldParameters=…,enable_expedited_requeue",
    )


@CONFIG.rule("S15", "nohold_on_prolog_fail")
def hold_on_prolog_failure(config: SiteConfig) -> Answer:
    if "nohold_on_prolog_fail" in (config.flags("SchedulerParameters") or ()):
        return ok("set")
    if not config.text("Prolog"):
        return ok("not set; there is no Prolog")
    return warn(
        "not set",
        "a node whose prolog fails leaves the job held: nobody starts it again at 3 a.m.",
        "slurm.conf: SchedulerParameters=…,nohold_on_prolog_fail; meanwhile: scontrol release JOBID",
    )


@CONFIG.rule("S16", "PrologFlags")
def prolog_flags(config: SiteConfig) -> Answer:
    flags = config.flags("PrologFlags")
    said = ",".join(flags or ()) or "none"
    if flags is None:
        return unknown("not shown")
    if not config.text("Prolog"):
        return ok(f"{said}; there is no Prolog")
    missing = [name for name in ("Alloc", "DeferBatch") if name.lower() not in flags]
    if "contain" in flags and "Alloc" in missing:
        missing.remove("Alloc")  # Contain implies it
    if not missing:
        return ok(said)
    return warn(
        said,
        "the batch script begins before every node's prolog has checked its node; one that fails then "
        "cancels it in the middle",
        "slurm.conf: PrologFlags=Alloc,Contain,DeferBatch",
    )


@CONFIG.rule("S17", "prolog time-outs")
def prolog_timeout(config: SiteConfig) -> Answer:
    split = [config.values[name] for name in ("PrologTimeout", "EpilogTimeout") if name in config.values]
    shown = split or [config.values[name] for name in ("PrologEpilogTimeout",) if name in config.values]
    if not shown:
        return unknown("not shown")
    limits = [_limit(value) for value in shown]
    said = " and ".join("none" if limit is None else duration(limit) for limit in limits)
    shortest = min((limit for limit in limits if limit is not None), default=_HOOK_S)
    if shortest < _HOOK_S and any("nvrx" in (config.text(name) or "") for name in ("Prolog", "Epilog")):
        return warn(
            said,
            "our hooks may take longer, and Slurm drains a node whose hook it had to end, also a healthy one",
            f"slurm.conf: {'EpilogTimeout' if split else 'PrologEpilogTimeout'}={_HOOK_S}",
        )
    if None not in limits:
        return ok(said)
    if not (config.text("Prolog") or config.text("Epilog")):
        return ok(f"{said}; there is no Prolog")
    name = "PrologTimeout=120 EpilogTimeout=120" if split else "PrologEpilogTimeout=120"
    return warn(said, "a prolog that hangs keeps its node and the job for ever", f"slurm.conf: {name}")


def _limit(value: str) -> int | None:
    number = value.partition(" ")[0]
    return int(number) if number.isdecimal() and int(number) < _NO_LIMIT_S else None


@CONFIG.rule("S18", "PreemptMode")
def preempt_mode(config: SiteConfig) -> Answer:
    modes = config.flags("PreemptMode")
    if modes is None:
        return unknown("not shown")
    said = ",".join(modes) or "off"
    if "cancel" in modes:
        return warn(
            said.upper(),
            "a preempted job is gone, --requeue or not",
            "submit a successor: sbatch --dependency=afterany:JOBID, or ask for PreemptMode=REQUEUE",
        )
    return ok(said.upper())


@CONFIG.rule("S19", "JobFileAppend")
def job_file_append(config: SiteConfig) -> Answer:
    match config.number("JobFileAppend"):
        case None:
            return unknown("not shown")
        case 0:
            return ok("0", "a requeued job truncates its output file without sbatch --open-mode=append")
        case value:
            return ok(str(value))
