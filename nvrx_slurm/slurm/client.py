"""Ask Slurm about jobs and nodes through its command-line tools.

Commands are argument lists with a time-out, ``LC_ALL=C`` and explicit formats. "Slurm could not be asked" is
an error of its own and never means "gone" or "healthy".
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nvrx_slurm.slurm.hostlist import expand_hostlist

COMMAND_TIMEOUT_S = 30.0
_PREFERENCES = ("SQUEUE_", "SINFO_", "SCONTROL_", "SLURM_BITSTR_LEN")


class SlurmUnavailableError(RuntimeError):
    """Slurm could not be asked; nothing is known."""


class SlurmRefusedError(RuntimeError):
    """Slurm answered, and does not do it; the message is Slurm's."""


class UnknownJobError(LookupError):
    """Slurm answered and does not know the job (any more)."""


@dataclass(frozen=True)
class Job:
    """What Slurm holds about one job."""

    job_id: str
    state: str
    """Slurm's long state name, such as ``RUNNING``."""
    nodes: tuple[str, ...]
    """The allocation as it is now: a lost node is no longer in it."""
    batch_host: str | None
    work_dir: Path | None
    batch: bool
    """Submitted with sbatch; others can't be requeued."""
    requeue: bool
    """The user allows it (``sbatch --requeue`` or the site's default)."""
    restarts: int
    partition: str
    num_nodes: int
    required_nodes: tuple[str, ...]
    """``sbatch -w``."""
    excluded_nodes: tuple[str, ...]
    """``sbatch -x``, and what earlier requeues have added."""
    submitted: int = 0
    """Unix seconds; a requeue changes it. 0: not known."""
    ends: int | None = None
    """When its time is over, Unix seconds; it may still be changed. None: no limit, or not known."""
    preempted: bool = False
    """Slurm takes its nodes for another job, now or when a time of grace is over."""
    launches: int = 0
    """How often Slurm has had to launch it (``BatchFlag``): more than once only after failed launches."""


@dataclass(frozen=True)
class Node:
    """What Slurm holds about one node."""

    name: str
    state: str
    """Slurm's long state name in lower case, flags such as ``*`` included."""
    reason: str

    @property
    def responds(self) -> bool:
        """Slurm hears from it; sinfo and scontrol say in words of their own that it does not."""
        return not any(word in self.state for word in ("down", "not_responding", "*"))

    @property
    def usable(self) -> bool:
        """Jobs can be started on it, now or when it is free again, as far as Slurm knows."""
        bad = any(word in self.state for word in ("drain", "fail", "maint", "unknown"))
        return self.responds and not bad


@dataclass(frozen=True)
class SlurmConfig:
    """The parts of ``scontrol show config`` that decisions need."""

    kill_wait_s: int
    slurmd_timeout_s: int
    max_batch_requeue: int | None = None
    """After so many failed launches a job is held, and its owner can't release it; None: before 23.02."""


class SlurmClient(Protocol):
    """What the rest of the package needs to know from Slurm."""

    def job(self, job_id: str) -> Job:
        """Return the job.

        Raises:
            SlurmUnavailableError, UnknownJobError
        """
        ...

    def node_address(self, node: str) -> str:
        """Return the address that Slurm itself uses for ``node`` (``NodeAddr``).

        Raises:
            SlurmUnavailableError
        """
        ...

    def node(self, node: str) -> Node:
        """Return what Slurm holds about ``node``.

        Raises:
            SlurmUnavailableError
        """
        ...

    def partition_nodes(self, partition: str) -> list[Node]:
        """Return the nodes of ``partition``.

        Raises:
            SlurmUnavailableError
        """
        ...

    def comment(self, job_id: str) -> str:
        """Return the job's Comment, exactly.

        Raises:
            SlurmUnavailableError, UnknownJobError
        """
        ...

    def config(self) -> SlurmConfig:
        """Return the site's configuration.

        Raises:
            SlurmUnavailableError
        """
        ...

    def requeue(self, job_id: str) -> None:
        """Requeue the job.

        Raises:
            SlurmRefusedError, SlurmUnavailableError
        """
        ...

    def requeue_hold(self, job_id: str) -> None:
        """Requeue the job in held state.

        Raises:
            SlurmRefusedError, SlurmUnavailableError
        """
        ...

    def update_job(self, job_id: str, **fields: str) -> None:
        """Change fields of the job, named as scontrol names them.

        Raises:
            SlurmRefusedError, SlurmUnavailableError
        """
        ...

    def release(self, job_id: str) -> None:
        """Release a held job.

        Raises:
            SlurmRefusedError, SlurmUnavailableError
        """
        ...


Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


def _run(
    argv: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=dict(environ),
        capture_output=True,
        # What users and operators have written comes along, in whatever encoding they had.
        encoding="utf-8",
        errors="surrogateescape",
        timeout=timeout_s,
        check=False,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


class ScontrolClient:
    """:class:`SlurmClient` over ``scontrol``, which is there wherever Slurm is.

    Args:
        environ: of the commands; this process's own unless given.
        run: runs the commands instead; it keeps its own time-out.
        timeout_s: a command that takes longer means that Slurm could not be asked.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        run: Run | None = None,
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        given = os.environ if environ is None else environ
        self._environ = {
            # Else a user's preferences would leave jobs and nodes out.
            **{name: value for name, value in given.items() if not name.startswith(_PREFERENCES)},
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",
        }
        self._run = run or functools.partial(_run, timeout_s=timeout_s)
        self._exact_ids: dict[str, str] = {}

    def job(self, job_id: str) -> Job:
        return parse_job(self._show_job(job_id), job_id)

    def _show_job(self, job_id: str) -> str:
        told = self._scontrol("show", "job", job_id)
        self._exact_ids[job_id] = exact_job_id(told, job_id)
        return told

    def _exactly(self, job_id: str) -> str:
        """Return what means this job alone.

        The id of one task of an array is that of the array, too: an order for it is one for all of them.
        """
        if job_id not in self._exact_ids:
            try:
                self._show_job(job_id)
            except UnknownJobError as error:
                raise SlurmRefusedError(str(error)) from error
        return self._exact_ids[job_id]

    def node(self, node: str) -> Node:
        fields = parse_fields(self._scontrol("show", "node", node))
        return Node(node, fields.get("State", "unknown").lower(), fields.get("Reason", ""))

    def partition_nodes(self, partition: str) -> list[Node]:
        argv = ["sinfo", "-h", "-N", "-p", partition, "-o", "%N|%T|%E"]
        return parse_nodes(self._output(argv))

    def comment(self, job_id: str) -> str:
        return parse_comment(self._answer(["squeue", "-h", "-o", "%A|%k", "-j", job_id]), job_id)

    def config(self) -> SlurmConfig:
        return parse_config(self._scontrol("show", "config"))

    def requeue(self, job_id: str) -> None:
        self._order("requeue", self._exactly(job_id))

    def requeue_hold(self, job_id: str) -> None:
        self._order("requeuehold", self._exactly(job_id))

    def update_job(self, job_id: str, **fields: str) -> None:
        job_id = self._exactly(job_id)
        self._order("update", f"JobId={job_id}", *(f"{name}={value}" for name, value in fields.items()))

    def release(self, job_id: str) -> None:
        self._order("release", self._exactly(job_id))

    def _order(self, *arguments: str) -> None:
        done = self._call(["scontrol", *arguments])
        if done.returncode != 0:
            raise SlurmRefusedError(_last_line(done))

    def node_address(self, node: str) -> str:
        fields = parse_fields(self._scontrol("show", "node", node))
        return fields.get("NodeAddr", node)

    def _scontrol(self, *arguments: str) -> str:
        return self._output(["scontrol", "-o", *arguments])

    def _output(self, argv: Sequence[str]) -> str:
        """Return what can be printed and written anywhere."""
        return _writable(self._answer(argv))

    def _answer(self, argv: Sequence[str]) -> str:
        """Return the very bytes, for who gives them back to Slurm."""
        done = self._call(argv)
        if done.returncode != 0:
            why = _last_line(done)
            if "Invalid job id" in why:
                raise UnknownJobError(f"Slurm does not know job {argv[-1]}")
            raise SlurmUnavailableError(f"`{' '.join(argv)}`: {why}")
        return done.stdout

    def _call(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return self._run(argv, self._environ)
        except FileNotFoundError as error:
            raise SlurmUnavailableError(f"{argv[0]} is not installed or not on PATH") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmUnavailableError(
                f"`{' '.join(argv)}` did not answer in {error.timeout:g} s"
            ) from error
        except OSError as error:
            raise SlurmUnavailableError(f"{argv[0]} cannot be run: {error.strerror}") from error


def _writable(text: str) -> str:
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    said = _writable(done.stderr).strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"


_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")


_JOB_NAME = re.compile(r" JobName=.*(?= UserId=\S+\(\d+\) GroupId=)")


def parse_fields(line: str) -> dict[str, str]:
    """Return the ``Key=value`` fields of one ``scontrol -o`` line; values may hold spaces."""
    matches = list(_FIELD.finditer(line))
    ends = [match.start() for match in matches[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for match, end in zip(matches, ends, strict=True):
        fields.setdefault(match.group(1), line[match.end() : end].strip())
    return fields


def full_job_id(fields: Mapping[str, str]) -> str:
    """Return a job's id as Slurm shows it: ``41``, ``41_2`` of an array, ``41_[1-3%1]`` while that waits."""
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")
    if array is None or not task:
        return fields["JobId"]
    return f"{array}_{task}" if task.isdecimal() else f"{array}_[{task}]"


def exact_job_id(text: str, job_id: str) -> str:
    """Read ``scontrol -o show job``; return the id that means ``job_id`` and no other task of its array.

    Of whatever a job's name makes of the text, nothing leads to another job than this.

    Raises:
        UnknownJobError: the text does not hold the job.
    """
    fields = _job_fields(text, job_id)
    return full_job_id(fields) if fields.get("ArrayJobId") == job_id else job_id


def _job_fields(text: str, job_id: str) -> dict[str, str]:
    # Asked about the first task of a job array, or the leader of a heterogeneous job, Slurm tells of all.
    jobs = re.split(r"^(?=JobId=\d+ )", text, flags=re.M)
    told = next((told for told in jobs if told.startswith(f"JobId={job_id} ")), None)
    if told is None:
        raise UnknownJobError(f"Slurm does not know job {job_id}")
    # The name may hold anything, new lines and what looks like fields, too; it is the only free text before
    # what we need.
    return parse_fields(_JOB_NAME.sub(" ", told.replace("\n", " "), count=1))


def parse_job(text: str, job_id: str) -> Job:
    """Read ``scontrol -o show job``.

    Raises:
        UnknownJobError: the text does not hold the job.
        HostlistError: the node list cannot be read.
    """
    fields = _job_fields(text, job_id)

    def present(name: str) -> str | None:
        value = fields.get(name, "")
        return None if value in ("", "(null)", "None", "N/A") else value

    def number(name: str) -> int:
        match = re.match(r"\d+", fields.get(name, ""))
        return int(match.group()) if match else 0

    def moment(name: str) -> int | None:
        value = fields.get(name, "")
        return int(value) if value.isdecimal() else None

    # A job without a limit has an end all the same: a year after its start.
    limited = fields.get("TimeLimit") != "UNLIMITED"
    # The time of an earlier run's preemption stays.
    preempted = (moment("PreemptTime") or 0) > (moment("StartTime") or 0)
    work_dir = present("WorkDir")
    return Job(
        job_id=fields["JobId"],
        state=fields.get("JobState", "UNKNOWN"),
        nodes=tuple(expand_hostlist(present("NodeList") or "")),
        batch_host=present("BatchHost"),
        work_dir=Path(work_dir) if work_dir else None,
        launches=number("BatchFlag"),
        batch=number("BatchFlag") > 0,
        requeue=number("Requeue") == 1,
        restarts=number("Restarts"),
        partition=fields.get("Partition", ""),
        num_nodes=number("NumNodes"),
        required_nodes=tuple(expand_hostlist(present("ReqNodeList") or "")),
        excluded_nodes=tuple(expand_hostlist(present("ExcNodeList") or "")),
        submitted=moment("SubmitTime") or 0,
        ends=moment("EndTime") if limited else None,
        preempted=preempted or fields.get("JobState") == "PREEMPTED",
    )


def parse_comment(text: str, job_id: str) -> str:
    """Read ``squeue -h -o "%A|%k" -j JOB``; a comment may go over several lines.

    Asked about one task of a job array, Slurm may tell of all.

    Raises:
        UnknownJobError: the text does not hold the job.
    """
    for told in re.split(r"^(?=\d+\|)", text, flags=re.M):
        of, _, comment = told.partition("|")
        if of == job_id:
            comment = comment.removesuffix("\n")
            return "" if comment == "(null)" else comment
    raise UnknownJobError(f"Slurm does not know job {job_id}")


def parse_nodes(text: str) -> list[Node]:
    """Read ``sinfo -h -N -o "%N|%T|%E"``; a node in several lines counts once."""
    nodes: dict[str, Node] = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if name and state:
            nodes.setdefault(name, Node(name, state.lower(), reason))
    return list(nodes.values())


def parse_config(text: str) -> SlurmConfig:
    """Read ``scontrol show config``.

    Raises:
        SlurmUnavailableError: a value is missing, so this is something else.
    """

    def seconds(name: str) -> int:
        match = re.search(rf"^{name}\s*=\s*(\d+)", text, re.M)
        if match is None:
            raise SlurmUnavailableError(f"`scontrol show config` does not tell {name}")
        return int(match.group(1))

    most = re.search(r"^MaxBatchRequeue\s*=\s*(\d+)", text, re.M)
    return SlurmConfig(
        kill_wait_s=seconds("KillWait"),
        slurmd_timeout_s=seconds("SlurmdTimeout"),
        max_batch_requeue=int(most.group(1)) if most else None,
    )
