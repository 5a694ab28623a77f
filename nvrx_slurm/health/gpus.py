"""What the checks of GPUs have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import NOT_THERE, NvmlCode, NvmlError
from nvrx_slurm.health.result import CheckResult, ok, skip, warn

LOST = (NvmlCode.GPU_IS_LOST, NvmlCode.RESET_REQUIRED)
"""Told once, by ``gpu-lost``."""


def each_gpu(
    node: Node,
    signal: str,
    look: Callable[[int], Iterable[CheckResult]],
    gpus: Sequence[int] | None = None,
) -> list[CheckResult]:
    """Look at every GPU, or at ``gpus``; one that can't be read hides no other.

    Raises:
        UnavailableError: no NVML.
        NvmlError: the GPUs can't be counted.
    """
    there = range(node.nvml.count())
    chosen = [gpu for gpu in there if gpus is None or gpu in gpus]
    results: list[CheckResult] = []
    unsupported = []
    for gpu in chosen:
        try:
            results += look(gpu)
        except NvmlError as error:
            if error.code in NOT_THERE:
                unsupported.append(gpu)
            elif error.code in LOST:
                results.append(skip("can't be read: see gpu-lost", signal, name(gpu)))
            else:
                results.append(warn(f"can't be read: {error}", signal, name(gpu)))
    if chosen and len(unsupported) == len(chosen):
        return [skip("this GPU or driver does not tell", signal)]
    if not results:
        return [ok(f"{len(chosen)} GPUs, none to complain about", signal)]
    return results


def name(gpu: int) -> str:
    """Return a GPU's scope."""
    return f"gpu {gpu}"


def driver_branch(version: str) -> int | None:
    """Return 570 for ``570.86.15``; None for what is no version."""
    branch = version.partition(".")[0]
    return int(branch) if branch.isascii() and branch.isdigit() and len(branch) < 6 else None
