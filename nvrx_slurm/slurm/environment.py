"""What a job's environment says, and what of it a later ``srun`` may still see."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# What srun would read as its own options (srun(1), INPUT ENVIRONMENT VARIABLES) or would pass on although it
# describes the allocation as it was at the start. After a lost node these are stale, and srun refuses them.
_STALE_EXACT = frozenset(
    {
        "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
        "SLURM_TASKS_PER_NODE",
        "SLURM_JOB_CPUS_PER_NODE",
        "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0",
        "SLURM_CPUS_ON_NODE",
        "SLURM_GPUS",
        "SLURM_GPUS_PER_TASK",
        "SLURM_GPUS_PER_SOCKET",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_CORE",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_NTASKS_PER_TRES",
        "SLURM_DISTRIBUTION",
        "SLURM_DIST_PLANESIZE",
        "SLURM_CPU_BIND",
        "SLURM_KILL_BAD_EXIT",
        "SLURM_WAIT",
        "SLURM_NO_KILL",
        "SLURM_OVERLAP",
        "SLURM_EXCLUSIVE",
        "SLURM_EXACT",
        "SLURM_WHOLE",
        "SLURM_MPI_TYPE",
        "SLURM_RELATIVE",
        "SLURM_HOSTFILE",
        "SLURM_MULTI_PROG",
        "SLURM_TEST_EXEC",
        "SLURM_LABELIO",
        "SLURM_UNBUFFEREDIO",
        "SLURM_STDOUTMODE",
        "SLURM_STDERRMODE",
        "SLURM_STDINMODE",
        "SLURM_IMMEDIATE",
        "SLURM_EXPORT_ENV",
        "SLURM_EPILOG",
        "SLURM_PROLOG",
        "SLURM_TASK_PROLOG",
        "SLURM_TASK_EPILOG",
        "SLURM_DEPENDENCY",
        "SLURM_TIMELIMIT",
        "SLURM_REMOTE_CWD",
        "SLURM_WORKING_DIR",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_GTIDS",
        "SLURM_TASK_PID",
        "SLURM_LAUNCH_NODE_IPADDR",
        "SLURM_TOPOLOGY_ADDR",
        "SLURM_TOPOLOGY_ADDR_PATTERN",
    }
)
_STALE_PREFIXES = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_SRUN_COMM", "SLURM_MEM_BIND", "PMI", "PMIX")
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # salloc's interactive step and others that Slurm makes by itself
_STEP_DAEMON = re.compile(r"slurmstepd: \[(?:StepId=)?(\d+)(?:\+\d+)?\.(\w+)")


class NotInAllocationError(RuntimeError):
    """There is no Slurm job around this process."""


@dataclass(frozen=True)
class JobEnvironment:
    """The job that this process runs in."""

    job_id: str
    restart_count: int
    """How often Slurm has requeued the job; 0 in the first run, where Slurm leaves the variable unset."""
    submit_dir: Path
    node_name: str | None
    """This node, None on a login node (salloc)."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], cwd: Path) -> JobEnvironment:
        """Read ``SLURM_*``; ``cwd`` stands in for the submit directory where Slurm does not tell it.

        Raises:
            NotInAllocationError: ``SLURM_JOB_ID`` is missing.
        """
        job_id = environ.get("SLURM_JOB_ID", "")
        if not (job_id.isascii() and job_id.isdigit()):
            raise NotInAllocationError("SLURM_JOB_ID is not set: this is not inside a Slurm allocation")
        restarts = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            job_id=job_id,
            restart_count=int(restarts) if restarts.isdecimal() else 0,
            submit_dir=Path(environ.get("SLURM_SUBMIT_DIR") or cwd),
            node_name=environ.get("SLURMD_NODENAME") or None,
        )


def surrounding_step(environ: Mapping[str, str], titles: Iterable[str]) -> str | None:
    """Return the job step of an ``srun`` that this process is a task of, None in a batch script or salloc.

    ``SLURM_STEP_ID`` alone doesn't tell: a job that was submitted from within a step inherits that step's.

    Args:
        titles: command lines of this process's ancestors, the nearest first; asked only when they matter.
    """
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not (step.isascii() and step.isdigit()) or int(step) >= _FIRST_RESERVED_STEP:
        return None
    for title in titles:
        daemon = _STEP_DAEMON.match(title)
        if daemon is not None:
            inside = daemon[1] == job and daemon[2].isdigit() and int(daemon[2]) < _FIRST_RESERVED_STEP
            return f"{job}.{daemon[2]}" if inside else None
    return f"{job}.{step}"


def ancestor_titles() -> Iterator[str]:
    """Yield the command lines of this process's ancestors, the nearest first, as far as they can be read."""
    import psutil  # takes a fifth of a hook's time, which never needs it

    try:
        for process in psutil.Process().parents():
            yield " ".join(process.cmdline())
    except psutil.Error:
        return


def scrubbed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what would be stale or would change the meaning of the agents' ``srun``."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _STALE_EXACT and not name.startswith(_STALE_PREFIXES)
    }
