"""Ask Slurm about jobs and nodes through its command-line tools.

Commands are argument lists with a time-out, ``LC_ALL=C`` and explicit formats. "Slurm could not be asked" is
an error of its own and never means "gone" or "healthy".
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nvrx_slurm.slurm.hostlist import expand_hostlist

COMMAND_TIMEOUT_S = 30.0


class SlurmUnavailableError(RuntimeError):
    """Slurm could not be asked; nothing is known."""


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


Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


class ScontrolClient:
    """:class:`SlurmClient` over ``scontrol``, which is there wherever Slurm is."""

    def __init__(self, environ: Mapping[str, str] | None = None, run: Run = _run) -> None:
        self._environ = {
            **(os.environ if environ is None else environ),
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",
        }
        self._run = run

    def job(self, job_id: str) -> Job:
        return parse_job(self._scontrol("show", "job", job_id), job_id)

    def node_address(self, node: str) -> str:
        fields = parse_fields(self._scontrol("show", "node", node))
        return fields.get("NodeAddr", node)

    def _scontrol(self, *arguments: str) -> str:
        argv = ["scontrol", "-o", *arguments]
        try:
            done = self._run(argv, self._environ)
        except FileNotFoundError as error:
            raise SlurmUnavailableError("scontrol is not installed or not on PATH") from error
        except subprocess.TimeoutExpired as error:
            raise SlurmUnavailableError(
                f"`{' '.join(argv)}` did not answer in {error.timeout:g} s"
            ) from error
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()
            why = said[-1] if said else f"exit code {done.returncode}"
            if "Invalid job id" in why:
                raise UnknownJobError(f"Slurm does not know job {arguments[-1]}")
            raise SlurmUnavailableError(f"`{' '.join(argv)}`: {why}")
        return done.stdout


_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")


def parse_fields(line: str) -> dict[str, str]:
    """Return the ``Key=value`` fields of one ``scontrol -o`` line; values may hold spaces."""
    matches = list(_FIELD.finditer(line))
    ends = [match.start() for match in matches[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for match, end in zip(matches, ends, strict=True):
        fields.setdefault(match.group(1), line[match.end() : end].strip())
    return fields


def parse_job(text: str, job_id: str) -> Job:
    """Read ``scontrol -o show job``.

    Raises:
        UnknownJobError: the text holds no job.
        HostlistError: the node list cannot be read.
    """
    fields = parse_fields(text)
    if "JobId" not in fields:
        raise UnknownJobError(f"Slurm does not know job {job_id}")

    def present(name: str) -> str | None:
        value = fields.get(name, "")
        return None if value in ("", "(null)", "None", "N/A") else value

    work_dir = present("WorkDir")
    return Job(
        job_id=fields["JobId"],
        state=fields.get("JobState", "UNKNOWN"),
        nodes=tuple(expand_hostlist(present("NodeList") or "")),
        batch_host=present("BatchHost"),
        work_dir=Path(work_dir) if work_dir else None,
    )
