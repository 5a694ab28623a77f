"""Who is on the job's GPUs?"""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.other_jobs import job_of, other_jobs
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.unavailable import UnavailableError

_SIGNAL = "nvmlDeviceGetComputeRunningProcesses"
_MOST_NAMED = 4


class GpuProcessesSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allowed: Annotated[
        tuple[str, ...], msgspec.Meta(description="names of programs that belong on a GPU between jobs")
    ] = ("nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "dcgm-exporter", "Xorg")


@check(
    "gpu-processes",
    stages=(Stage.PROLOG, Stage.EPILOG),
    needs=(Need.NVML, Need.PROCFS),
    settings=GpuProcessesSettings,
    strikes=3,
)
def gpu_processes(node: Node, settings: GpuProcessesSettings) -> list[CheckResult]:
    """Nobody else's process is on the job's GPUs.

    Lists the processes on the GPUs that Slurm gave the job, before its first and after its last process. On
    GPUs of other jobs nothing is looked for; without Slurm's word on GPUs, all are looked at. A process
    of another job that runs is no finding: jobs may share a GPU, and one without GPUs is told of none.
    """

    def look(gpu: int) -> list[CheckResult]:
        pids = node.nvml.processes(gpu)
        others = other_jobs(node) if pids else ()
        names = {pid: _comm(node, pid) for pid in pids if job_of(node, pid) not in others}
        stray = {pid: comm for pid, comm in names.items() if not comm.startswith(settings.allowed)}
        if not stray:
            return []
        said = ", ".join(f"{comm or '?'} ({pid})" for pid, comm in list(stray.items())[:_MOST_NAMED])
        more = f" and {len(stray) - _MOST_NAMED} more" if len(stray) > _MOST_NAMED else ""
        remedy = "end these processes; one that does not end needs a reboot"
        return [fail(f"processes of no job: {said}{more}", _SIGNAL, name(gpu), remedy=remedy)]

    return each_gpu(node, _SIGNAL, look, node.job.gpus)


def _comm(node: Node, pid: int) -> str:
    try:
        return node.tree.text(f"/proc/{pid}/comm")[:15]
    except UnavailableError:
        return ""
