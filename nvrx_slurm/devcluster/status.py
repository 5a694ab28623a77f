"""How a cluster is, at a glance: power, cable and daemon of each node, and what Slurm says about it."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path

from nvrx_slurm.devcluster import machine, network, state
from nvrx_slurm.devcluster.client import NodeInfo, SlurmClient
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.state import CONTROLLER, ClusterState, Layout, Phase


class Power(str, enum.Enum):
    ON = "on"
    OFF = "off"


class Link(str, enum.Enum):
    UP = "up"
    CUT = "cut"


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    name: str
    address: str
    power: Power
    link: Link
    slurmd: bool
    """Whether its slurmd runs."""
    slurm_state: str | None
    """As ``scontrol show node`` has it, in lower case; None when slurmctld could not be asked."""
    reason: str


@dataclasses.dataclass(frozen=True)
class ClusterStatus:
    name: str
    phase: Phase
    controller: bool
    """Whether slurmctld and its munged run."""
    subnet: str
    gpus_per_node: int
    slurm_conf: Path
    nodes: tuple[NodeStatus, ...]


def is_running(layout: Layout, there: ClusterState) -> bool:
    """Whether the controller is as the cluster's ``up`` left it."""
    if there.phase is not Phase.UP or there.boot_id != state.boot_id():
        return False
    controller = machine.running(layout.record(CONTROLLER))
    return controller is not None and all(
        machine.has_daemon(controller, name) for name in ("munged", "slurmctld")
    )


def describe(layout: Layout, there: ClusterState) -> ClusterStatus:
    subnet = Subnet(there.index)
    controller = is_running(layout, there)
    seen = SlurmClient(layout.slurm_conf).nodes() if controller else None
    return ClusterStatus(
        name=there.name,
        phase=there.phase,
        controller=controller,
        subnet=str(subnet.network),
        gpus_per_node=there.gpus_per_node,
        slurm_conf=layout.slurm_conf,
        nodes=tuple(_describe_node(layout, node, subnet, seen) for node in there.node_names),
    )


def _describe_node(layout: Layout, node: str, subnet: Subnet, seen: dict[str, NodeInfo] | None) -> NodeStatus:
    inside = machine.running(layout.record(node))
    info = (seen or {}).get(node)
    return NodeStatus(
        name=node,
        address=subnet.address(node),
        power=Power.OFF if inside is None else Power.ON,
        link=Link.UP if network.is_plugged_in(subnet, node) else Link.CUT,
        slurmd=inside is not None and machine.has_daemon(inside, "slurmd"),
        slurm_state=info.state if info else None,
        reason=info.reason if info else "",
    )
