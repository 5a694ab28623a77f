"""Start a cluster, bring nodes back, and take it all down again. The caller holds the cluster's lock."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import time
from collections.abc import Callable, Sequence

from nvrx_slurm.devcluster import files, machine, network, preflight, state
from nvrx_slurm.devcluster.client import NodeInfo, SlurmClient
from nvrx_slurm.devcluster.config import CONTROLLER_PORT
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.state import CONTROLLER, ClusterState, Layout, Phase

_CONTROLLER_READY_S = 30.0
_NODES_READY_S = 60.0


def start(
    layout: Layout,
    nodes: int,
    gpus_per_node: int,
    nics: int | None,
    shares: tuple[str, ...],
    slurm_conf: tuple[str, ...],
    lock_fd: int,
) -> None:
    """Bring up a cluster of which nothing exists, and return when every node is idle.

    Raises:
        DevClusterError: it does not come up; what has been made so far is still there.
    """
    programs = preflight.find_programs(*files.PROGRAMS)
    version = preflight.slurm_version(programs["slurmd"])
    with state.allocation_lock():
        subnet = network.pick_slot(state.used_slots(), network.interfaces(), network.routes())
        fresh = ClusterState(
            name=layout.root.name,
            index=subnet.index,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            shares=shares,
            phase=Phase.STARTING,
            boot_id=state.boot_id(),
            nics=nics,
            slurm_conf=slurm_conf,
        )
        layout.root.mkdir(mode=0o755)
        state.save(layout, fresh)
    files.make_cluster(layout, fresh, subnet, version, socket.gethostname().partition(".")[0])
    network.create_bridge(subnet)
    plans = [files.plan(layout, fresh, member, programs) for member in (CONTROLLER, *fresh.node_names)]
    machine.boot(plans, subnet, lock_fd, lambda: _await_controller(layout, subnet))
    _await_nodes(layout, fresh.node_names, lambda info: info.state == "idle")
    state.save(layout, dataclasses.replace(fresh, phase=Phase.UP))


def power_off(layout: Layout, there: ClusterState, node: str) -> None:
    """End everything on a node, such that its peers hear nothing of it: the cable goes first."""
    subnet = Subnet(there.index)
    network.cut(subnet, node)
    machine.power_off([layout.record(node)])
    network.remove([subnet.port(node)])


def restore(
    layout: Layout, there: ClusterState, nodes: Sequence[str], lock_fd: int, unnoticed: bool = False
) -> None:
    """Bring back those of the nodes that are switched off, cut off, without their daemons or DOWN.

    Returns when slurmctld hears from all of them, and none is DOWN. ``unnoticed``: a node that was switched
    off is back before slurmctld has missed it, so that jobs keep it.

    Raises:
        DevClusterError: one does not come back.
    """
    subnet = Subnet(there.index)
    slurm = SlurmClient(layout.slurm_conf)
    known = slurm.nodes() or {}
    to_boot = []
    for node in nodes:
        inside = machine.running(layout.record(node))
        if inside is None or not all(machine.has_daemon(inside, name) for name in ("munged", "slurmd")):
            power_off(layout, there, node)
            files.make_node(layout, node)
            # A real machine takes longer to boot than slurmctld to notice. This one would be back before, in
            # the middle of a job whose processes on it are gone.
            if not unnoticed and node in known and known[node].base != "down":
                slurm.report_lost(node)
            to_boot.append(node)
        elif not network.is_plugged_in(subnet, node):
            network.heal(subnet, node)
    since = int(time.time())
    if to_boot:
        programs = preflight.find_programs(*files.PROGRAMS)
        plans = [files.plan(layout, there, node, programs, rebooted=True) for node in to_boot]
        machine.boot(plans, subnet, lock_fd, lambda: None)
    resumed: set[str] = set()

    def is_back(info: NodeInfo) -> bool:
        if info.name in to_boot and info.registered < since:
            return False
        # slurmctld talks to a DOWN node again only minutes later, unless it is told to.
        if info.base == "down" and info.name not in resumed and slurm.resume(info.name):
            resumed.add(info.name)
        return info.responds and info.base != "down"

    _await_nodes(layout, nodes, is_back)


def tear_down(layout: Layout) -> None:
    """Remove all that a cluster in whatever condition has left, and nothing else."""
    there = state.load(layout)
    if there is not None:
        state.save(layout, dataclasses.replace(there, phase=Phase.STOPPING))
        if there.boot_id == state.boot_id():
            machine.power_off([layout.record(member) for member in (CONTROLLER, *there.node_names)])
        subnet = Subnet(there.index)
        network.remove(name for name in network.interfaces() if subnet.owns(name))
    if layout.root.exists():
        files.unmount_below(layout.root)
        shutil.rmtree(layout.root)


def _await_controller(layout: Layout, subnet: Subnet) -> None:
    def answers() -> bool:
        try:
            socket.create_connection((subnet.address(CONTROLLER), CONTROLLER_PORT), timeout=1).close()
        except OSError:
            _require_daemon(layout, CONTROLLER, "slurmctld")
            return False
        return True

    if not machine.wait_for(answers, _CONTROLLER_READY_S, interval_s=0.02):
        raise DevClusterError(
            f"slurmctld does not answer within {_CONTROLLER_READY_S:g} s: {_evidence(layout, CONTROLLER)}"
        )


def _await_nodes(layout: Layout, nodes: Sequence[str], is_well: Callable[[NodeInfo], bool]) -> None:
    slurm = SlurmClient(layout.slurm_conf)
    seen: dict[str, NodeInfo] = {}
    missing = set(nodes)

    def all_well() -> bool:
        seen.update(slurm.nodes() or {})
        missing.difference_update([node for node in missing if node in seen and is_well(seen[node])])
        for node in missing:
            _require_daemon(layout, node, "slurmd")
        return not missing

    if not machine.wait_for(all_well, _NODES_READY_S, interval_s=0.1):
        node = min(missing)
        now = f"{seen[node].state} {seen[node].reason}".strip() if node in seen else "unknown"
        raise DevClusterError(
            f"node {node} is {now} in Slurm after {_NODES_READY_S:g} s: {_evidence(layout, node)}"
        )


def _require_daemon(layout: Layout, member: str, name: str) -> None:
    inside = machine.running(layout.record(member))
    if inside is None or not machine.has_daemon(inside, name):
        raise DevClusterError(f"{name} on {member} has ended: {_evidence(layout, member)}")


def _evidence(layout: Layout, member: str) -> str:
    return f"its console says: {machine.complaint_in(layout.console(member)) or 'nothing'}"
