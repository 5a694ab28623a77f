"""What a person's question to Slurm needs, beyond what a running job asks: the whole configuration, and why a
job stands as it does.

Which release has what is decided by the keys that it shows, not by its number, wherever a key tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from nvrx_slurm.slurm.client import (
    _JOB_NAME,
    Node,
    ScontrolClient,
    SlurmUnavailableError,
    UnknownJobError,
    full_job_id,
    parse_fields,
)
from nvrx_slurm.slurm.hostlist import expand_hostlist

_NOTHING = ("", "(null)", "None", "N/A", "none")


class SlurmRelease(NamedTuple):
    """``22.05`` of ``22.05.8``."""

    year: int
    month: int

    def __str__(self) -> str:
        return f"{self.year}.{self.month:02d}"


@dataclass(frozen=True)
class SiteConfig:
    """``scontrol show config``, by Slurm's own names."""

    values: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """Return the value; "" when it is set to nothing, None when this release does not have it."""
        value = self.values.get(name)
        return value if value is None or value not in _NOTHING else ""

    def number(self, name: str) -> int | None:
        """Return the leading number of the value, None without one."""
        match = re.match(r"\d+", self.values.get(name, ""))
        return int(match.group()) if match else None

    def flags(self, name: str) -> tuple[str, ...] | None:
        """Return a comma-separated value in lower case, None when this release does not have it."""
        value = self.text(name)
        return None if value is None else tuple(part for part in value.lower().split(",") if part)

    def flag_value(self, name: str, flag: str) -> str | None:
        """Return ``5`` of ``requeue_delay=5``, None without it."""
        for part in self.flags(name) or ():
            key, _, value = part.partition("=")
            if key == flag:
                return value
        return None

    @property
    def release(self) -> SlurmRelease | None:
        match = re.match(r"(\d+)\.(\d+)", self.values.get("SLURM_VERSION", ""))
        return SlurmRelease(int(match.group(1)), int(match.group(2))) if match else None


@dataclass(frozen=True)
class QueuedJob:
    """Everything about one job that explains how it stands."""

    job_id: str
    """``41``, or ``41_2`` for an element of an array, ``41_[1-3%1]`` for those that still wait."""
    name: str
    user: str
    state: str
    """Slurm's long state name, such as ``PENDING``."""
    reason: str
    """Slurm's reason with spaces, as squeue shows it: ``launch failed requeued held``."""
    priority: int
    """0: held, whatever the reason says."""
    batch: bool
    batch_flag: int
    """How often Slurm has launched it, plus one; beyond MaxBatchRequeue it is held."""
    requeue: bool
    restarts: int
    partition: str
    num_nodes: int
    nodes: tuple[str, ...]
    batch_host: str | None
    required_nodes: tuple[str, ...]
    excluded_nodes: tuple[str, ...]
    dependency: str
    exit_code: int
    exit_signal: int
    start_time: int | None
    """Seconds since the epoch; of a pending job what Slurm expects."""
    eligible_time: int | None
    end_time: int | None
    time_limit: str
    work_dir: Path | None
    array: bool
    heterogeneous: bool

    @property
    def held(self) -> bool:
        return self.priority == 0


class DiagnosisClient(Protocol):
    """What explaining a site or a job needs to ask."""

    def ping(self) -> str:
        """Return what ``scontrol ping`` says.

        Raises:
            SlurmUnavailableError: no controller answers.
        """
        ...

    def site_config(self) -> SiteConfig:
        """Return the whole configuration.

        Raises:
            SlurmUnavailableError
        """
        ...

    def queued_jobs(self, job_id: str) -> list[QueuedJob]:
        """Return the job; of an array or a heterogeneous job every part that Slurm lists by itself.

        Raises:
            SlurmUnavailableError, UnknownJobError
        """
        ...

    def partition_nodes(self, partition: str) -> list[Node]:
        """Return the nodes of ``partition``.

        Raises:
            SlurmUnavailableError
        """
        ...


class ScontrolDiagnosis(ScontrolClient):
    """:class:`DiagnosisClient` over ``scontrol`` and ``sinfo``."""

    def ping(self) -> str:
        done = self._call(["scontrol", "ping"])
        if not re.search(r"\bis UP\b", done.stdout):
            said = (done.stdout + done.stderr).strip().splitlines()
            raise SlurmUnavailableError(f"`scontrol ping`: {said[-1] if said else 'no answer'}")
        return done.stdout.strip()

    def site_config(self) -> SiteConfig:
        return parse_site_config(self._output(["scontrol", "show", "config"]))

    def queued_jobs(self, job_id: str) -> list[QueuedJob]:
        return parse_queued_jobs(self._scontrol("show", "job", job_id), job_id)


def parse_site_config(text: str) -> SiteConfig:
    """Read ``scontrol show config``.

    Raises:
        SlurmUnavailableError: the text is something else.
    """
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z0-9_\[\]]+", name.strip()):
            values.setdefault(name.strip(), value.strip())
    if "SlurmctldPort" not in values:
        raise SlurmUnavailableError("`scontrol show config` does not show a configuration")
    return SiteConfig(values)


def parse_queued_jobs(text: str, job_id: str) -> list[QueuedJob]:
    """Read ``scontrol -o show job`` with ``SLURM_TIME_FORMAT=%s``: one job a line.

    Raises:
        UnknownJobError: the text holds no job.
        HostlistError: a node list cannot be read.
    """
    jobs = [_queued_job(line) for line in text.splitlines() if line.startswith("JobId=")]
    if not jobs:
        raise UnknownJobError(f"Slurm does not know job {job_id}")
    return jobs


def _queued_job(line: str) -> QueuedJob:
    name = _JOB_NAME.search(line)
    fields = parse_fields(_JOB_NAME.sub(" ", line, count=1))

    def present(name: str) -> str:
        value = fields.get(name, "")
        return "" if value in _NOTHING else value

    def number(name: str) -> int:
        return _leading_number(fields.get(name, "")) or 0

    def hosts(name: str) -> tuple[str, ...]:
        return tuple(expand_hostlist(present(name)))

    exit_code, _, exit_signal = fields.get("ExitCode", "").partition(":")
    work_dir = present("WorkDir")
    return QueuedJob(
        job_id=full_job_id(fields),
        name=name.group().removeprefix(" JobName=") if name else "",
        user=present("UserId").partition("(")[0],
        state=fields.get("JobState", "UNKNOWN"),
        # A node list may hold underscores; it follows the first colon.
        reason=_spaced(present("Reason")),
        priority=number("Priority"),
        batch=number("BatchFlag") > 0,
        batch_flag=number("BatchFlag"),
        requeue=number("Requeue") == 1,
        restarts=number("Restarts"),
        partition=present("Partition"),
        num_nodes=number("NumNodes"),
        nodes=hosts("NodeList"),
        batch_host=present("BatchHost") or None,
        required_nodes=hosts("ReqNodeList"),
        excluded_nodes=hosts("ExcNodeList"),
        dependency=present("Dependency"),
        exit_code=_leading_number(exit_code) or 0,
        exit_signal=_leading_number(exit_signal) or 0,
        start_time=_leading_number(fields.get("StartTime", "")),
        eligible_time=_leading_number(fields.get("EligibleTime", "")),
        end_time=_leading_number(fields.get("EndTime", "")),
        time_limit=present("TimeLimit"),
        work_dir=Path(work_dir) if work_dir else None,
        array="ArrayJobId" in fields,
        heterogeneous="HetJobId" in fields,
    )


def _leading_number(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else None


def _spaced(reason: str) -> str:
    words, colon, nodes = reason.partition(":")
    return words.replace("_", " ") + colon + nodes


def unavailable_nodes(reason: str) -> Sequence[str]:
    """Return the nodes that a reason such as ``ReqNodeNotAvail, UnavailableNodes:n[1-2]`` names."""
    _, colon, nodes = reason.partition("UnavailableNodes:")
    return expand_hostlist(nodes.strip()) if colon else ()
