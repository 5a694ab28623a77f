"""Which NUMA node each rank of this node is bound to; reads sysfs only."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvrx_slurm.agent.server_protocol import NumaBinding

GPUS_PER_NUMA_VARIABLE = "NVRX_GPUS_PER_NUMA"
"""NVIDIA's extension binds by it: local rank // this is the node. It switches binding on here, too."""


class NumaError(ValueError):
    """The ranks can't be bound as asked."""


def gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """Return what the variable says, None without.

    Raises:
        NumaError: no number above 0.
    """
    text = environ.get(GPUS_PER_NUMA_VARIABLE, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise NumaError(f"{GPUS_PER_NUMA_VARIABLE}={text}: a number above 0 is accepted")
    return int(text)


def usable_nodes(sysfs: Path, allowed: frozenset[int]) -> dict[int, list[int]]:
    """Return the CPUs of each NUMA node that this process may use; ``allowed``: its affinity or cpuset."""
    nodes = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            cpus = allowed.intersection(_parse_list((folder / "cpulist").read_text()))
            if cpus:
                nodes[int(folder.name[4:])] = sorted(cpus)
    return dict(sorted(nodes.items()))


def node_of_device(sysfs: Path, pci_address: str) -> int | None:
    """Return the NUMA node of a PCI device, None if the machine does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def plan_bindings(
    slots: int,
    nodes: Mapping[int, Sequence[int]],
    gpu_nodes: Sequence[int | None],
    per_node: int | None,
    strict: bool,
) -> list[NumaBinding | None]:
    """Return where each local rank is bound; None: nowhere, for its NUMA node is not known or not usable.

    Args:
        nodes: the usable ones and their CPUs.
        gpu_nodes: the NUMA node of each GPU of the job; empty without GPUs: ranks are spread evenly then.
        per_node: ranks per NUMA node, in place of what the machine says.
    """

    def node_of(local_rank: int) -> int | None:
        if per_node is not None:
            return local_rank // per_node
        if gpu_nodes:
            return gpu_nodes[local_rank] if local_rank < len(gpu_nodes) else None
        return sorted(nodes)[local_rank * len(nodes) // slots] if nodes else None

    def binding_of(node: int | None) -> NumaBinding | None:
        return NumaBinding(node, list(nodes[node]), strict) if node is not None and node in nodes else None

    return [binding_of(node_of(local_rank)) for local_rank in range(slots)]


def _parse_list(text: str) -> set[int]:
    """Read the kernel's list format, ``0-3,8`` (cpuset(7))."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
