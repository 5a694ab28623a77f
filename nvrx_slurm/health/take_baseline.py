"""Taking the baseline: what is there now is what is expected from now on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nvrx_slurm.health.baseline import Baseline, PortBaseline
from nvrx_slurm.health.isolation import call_isolated
from nvrx_slurm.health.nics import Port, ports
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvlinks import active_links
from nvrx_slurm.health.nvml import NvmlError
from nvrx_slurm.health.unavailable import UnavailableError

_T = TypeVar("_T")
_BASELINE_S = 5.0


def take_baseline(node: Node) -> Baseline:
    """Read everything that later runs compare with; what can't be read is not in it."""
    uuids = _or_none(lambda: [node.nvml.uuid(gpu) for gpu in range(node.nvml.count())])
    gpus = dict(enumerate(uuids or ()))

    def of_gpus(read: Callable[[int], _T]) -> dict[str, _T]:
        found = {uuid: _or_none(lambda gpu=gpu: read(gpu)) for gpu, uuid in gpus.items()}  # type: ignore[misc]
        return {uuid: value for uuid, value in found.items() if value is not None}

    def idle_memory(gpu: int) -> int | None:
        return None if node.nvml.processes(gpu) else node.nvml.memory(gpu).used

    memory = of_gpus(idle_memory)
    return Baseline(
        boot_id=node.boot_id,
        taken=node.clock.now(),
        kernel_log_sequence=_last_sequence(node),
        gpus=uuids,
        uncorrected_ecc=of_gpus(node.nvml.uncorrected_ecc) if gpus else {},
        gpu_memory_used={uuid: used for uuid, used in memory.items() if used is not None},
        nvlinks=of_gpus(lambda gpu: active_links(node.nvml, gpu)[0]),
        ports={port.name: _port(node, port) for port in _or_none(lambda: ports(node.tree)) or ()},
    )


def remember_baseline(node: Node) -> str:
    """Take and save it in a process of its own; return why that can't be done, empty if it is.

    One that knows of GPUs or ports is not replaced by one that does not: a driver that does not answer for a
    moment must not make their loss the expected state. The process is another one because this one may fork
    again: a driver's library must not be open then, and it may hang.
    """

    def take() -> bool:
        taken, before = take_baseline(node), node.baseline
        if before is not None:
            for what, known, now in (("GPUs", before.gpus, taken.gpus), ("ports", before.ports, taken.ports)):
                if known and not now:
                    raise UnavailableError(f"{what} cannot be read, and could when the last one was taken")
        taken.save(node.state)
        return True

    return call_isolated({"baseline": take}, _BASELINE_S, bool)["baseline"].trouble


def _or_none(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except (UnavailableError, NvmlError):
        return None


def _last_sequence(node: Node) -> int | None:
    records = _or_none(node.kernel_log.records)
    return records[-1].sequence if records else None


def _port(node: Node, port: Port) -> PortBaseline:
    return PortBaseline(
        state=_or_none(lambda: port.state(node.tree)) or "",
        rate_gbps=_or_none(lambda: port.rate_gbps(node.tree)),
        counters=port.counters(node.tree)[0],
    )
