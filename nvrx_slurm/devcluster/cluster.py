"""The dev cluster's life: up, down, and what can happen to its nodes in between."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm.devcluster import files, machine, network, preflight, state
from nvrx_slurm.devcluster.client import NodeInfo, SlurmClient
from nvrx_slurm.devcluster.config import CONTROLLER_PORT
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.process import ProcessRecord
from nvrx_slurm.devcluster.state import CONTROLLER, ClusterState, Layout, Phase

_READY_S = 60.0
_QUEUE_S = 60.0
"""How long a command waits for another one that works on the same cluster; ``up`` does not wait."""


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
    slurm_state: str | None
    """None when slurmctld could not be asked."""
    reason: str


@dataclasses.dataclass(frozen=True)
class ClusterStatus:
    name: str
    phase: Phase
    subnet: str
    gpus_per_node: int
    slurm_conf: Path
    controller: bool
    """Whether slurmctld and munged run."""
    nodes: tuple[NodeStatus, ...]


class DevCluster:
    """A Slurm cluster on this machine, known by its name.

    The object holds nothing: any process may make one for the same name and use it. All that changes the
    cluster needs root. Every method raises DevClusterError with one sentence when it cannot do its work.
    """

    def __init__(self, name: str = "dev") -> None:
        self.name = state.check_name(name)
        self._layout = Layout.of(name)

    @property
    def node_names(self) -> tuple[str, ...]:
        return self._require().node_names

    @property
    def slurm_conf(self) -> Path:
        return self._layout.slurm_conf

    def run_dir_of(self, node: str) -> Path:
        """The directory of a node's simulated state, which the node sees at /run/nvrx-node.

        It outlives ``kill_node`` and ``restore_node`` and is removed by ``down``.
        """
        return self._layout.node_run(self._node(self._require(), node))

    def local_dir_of(self, node: str) -> Path:
        """The node's local disk, which the node sees at /local."""
        return self._layout.node_local(self._node(self._require(), node))

    def environment(self) -> dict[str, str]:
        """What to add to the environment of Slurm's commands so that they talk to this cluster."""
        self._require()
        return {"SLURM_CONF": str(self._layout.slurm_conf)}

    def up(self, nodes: int = 4, gpus_per_node: int = 2) -> None:
        """Start the cluster, and return when every node is idle.

        A cluster of the same shape that is already there is used again; nodes of it that were killed or cut
        off are restored.
        """
        _check_shape(nodes, gpus_per_node)
        preflight.require_root("nvrx-devcluster up")
        with state.cluster_lock(self._layout, "up", 0.0) as lock_fd:
            there = state.load(self._layout)
            if there is not None and self._is_running(there):
                if (there.nodes, there.gpus_per_node) != (nodes, gpus_per_node):
                    raise DevClusterError(
                        f"cluster {self.name!r} is already up with {there.nodes} nodes of "
                        f"{there.gpus_per_node} GPUs: take it down first, or choose another --name"
                    )
                self._restore(there, there.node_names, lock_fd)
                return
            try:
                programs = preflight.find_programs(*files.PROGRAMS)
                self._tear_down(there)
                self._start(nodes, gpus_per_node, programs, lock_fd)
            except BaseException:
                self._tear_down(state.load(self._layout))
                self._forget()
                raise

    def down(self) -> bool:
        """Stop everything and remove every trace; False when there was nothing."""
        if not self._layout.root.exists():
            return False
        preflight.require_root("nvrx-devcluster down")
        with state.cluster_lock(self._layout, "down", _QUEUE_S):
            self._tear_down(state.load(self._layout))
            self._forget()
        return True

    def status(self) -> ClusterStatus | None:
        """How the cluster is; None when there is none of this name."""
        there = state.load(self._layout)
        if there is None:
            return None
        subnet = Subnet(there.index)
        seen = SlurmClient(self._layout.slurm_conf).nodes() if self._is_running(there) else None
        return ClusterStatus(
            name=there.name,
            phase=there.phase,
            subnet=str(subnet.network),
            gpus_per_node=there.gpus_per_node,
            slurm_conf=self._layout.slurm_conf,
            controller=self._is_running(there),
            nodes=tuple(self._node_status(node, subnet, seen) for node in there.node_names),
        )

    def kill_node(self, node: str) -> None:
        """Cut the node's power: its cable first, so that its peers hear nothing, then every process of it."""
        preflight.require_root("nvrx-devcluster kill-node")
        with state.cluster_lock(self._layout, "kill-node", _QUEUE_S):
            there = self._require()
            self._power_off(there, self._node(there, node))

    def partition_node(self, node: str) -> None:
        """Cut the node's network; its processes go on."""
        preflight.require_root("nvrx-devcluster partition-node")
        with state.cluster_lock(self._layout, "partition-node", _QUEUE_S):
            there = self._require()
            node = self._node(there, node)
            self._require_power(node)
            network.cut(Subnet(there.index), node)

    def restore_node(self, node: str, wipe_local: bool = False) -> None:
        """Boot a killed node, plug a partitioned one in again, and return it to service in Slurm.

        Returns when slurmctld has it back. A node that is well stays as it is; one that someone drained
        stays drained.

        Args:
            wipe_local: the killed node comes back with an empty local disk.
        """
        preflight.require_root("nvrx-devcluster restore-node")
        with state.cluster_lock(self._layout, "restore-node", _QUEUE_S) as lock_fd:
            there = self._require()
            node = self._node(there, node)
            if wipe_local:
                if machine.running(self._layout.record(node)):
                    raise DevClusterError(
                        f"node {node} is running: kill-node it before wiping its local disk"
                    )
                files.make_node(self._layout, node, wipe_local=True)
            self._restore(there, (node,), lock_fd)

    def exec(self, node: str, argv: Sequence[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command inside a node, as root, in the same directory if the node has it.

        Args:
            kwargs: as for subprocess.run; ``env`` replaces the environment that has SLURM_CONF in it.
        """
        there = self._require()
        preflight.require_root("nvrx-devcluster exec")
        node = self._node(there, node)
        inside = self._require_power(node)
        directory = os.fspath(kwargs.pop("cwd", None) or _working_directory())
        kwargs.setdefault("env", {**os.environ, **self.environment()})
        return subprocess.run(machine.enter(inside, argv, directory), **kwargs)

    def _require(self) -> ClusterState:
        there = state.load(self._layout)
        if there is None or there.phase is not Phase.UP:
            raise DevClusterError(
                f"cluster {self.name!r} is not up: start it with nvrx-devcluster up --name {self.name}"
            )
        return there

    def _node(self, there: ClusterState, node: str) -> str:
        name = f"n{node}" if node.isdigit() else node
        if name not in there.node_names:
            raise DevClusterError(
                f"cluster {self.name!r} has no node {node!r}: its nodes are {', '.join(there.node_names)}"
            )
        return name

    def _require_power(self, node: str) -> ProcessRecord:
        inside = machine.running(self._layout.record(node))
        if inside is None:
            raise DevClusterError(
                f"node {node} is switched off: "
                f"boot it with nvrx-devcluster restore-node {node} --name {self.name}"
            )
        return inside

    def _is_running(self, there: ClusterState) -> bool:
        """Whether the controller is as this cluster's last ``up`` left it."""
        if there.phase is not Phase.UP or there.boot_id != state.boot_id():
            return False
        controller = machine.running(self._layout.record(CONTROLLER))
        return controller is not None and all(
            machine.has_daemon(controller, name) for name in ("munged", "slurmctld")
        )

    def _node_status(self, node: str, subnet: Subnet, seen: dict[str, NodeInfo] | None) -> NodeStatus:
        inside = machine.running(self._layout.record(node))
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

    def _start(self, nodes: int, gpus_per_node: int, programs: dict[str, str], lock_fd: int) -> None:
        version = preflight.slurm_version(programs["slurmd"])
        with state.allocation_lock():
            used = [other.index for other in state.all_states()]
            subnet = network.pick_slot(used, network.interfaces(), network.routes())
            fresh = ClusterState(
                self.name, subnet.index, nodes, gpus_per_node, Phase.STARTING, state.boot_id()
            )
            self._layout.root.mkdir(mode=0o755)
            state.save(self._layout, fresh)
        files.make_cluster(self._layout, fresh, subnet, version, socket.gethostname().partition(".")[0])
        network.create_bridge(subnet)
        members = (CONTROLLER, *fresh.node_names)
        plans = [files.plan(self._layout, member, programs) for member in members]
        machine.boot(plans, subnet, lock_fd, lambda: self._await_controller(subnet))
        self._await_nodes(fresh.node_names, lambda info: info.state == "idle")
        state.save(self._layout, dataclasses.replace(fresh, phase=Phase.UP))

    def _await_controller(self, subnet: Subnet) -> None:
        def answers() -> bool:
            try:
                socket.create_connection((subnet.address(CONTROLLER), CONTROLLER_PORT), timeout=1).close()
            except OSError:
                return False
            return True

        if not machine.wait_for(answers, _READY_S / 2, interval_s=0.02):
            log = self._layout.controller / "slurmctld.log"
            raise DevClusterError(
                f"slurmctld does not answer; its log ends with: {machine.last_line(log) or 'nothing'}"
            )

    def _await_nodes(self, nodes: Sequence[str], is_well: Callable[[NodeInfo], bool]) -> None:
        slurm = SlurmClient(self._layout.slurm_conf)
        seen: dict[str, NodeInfo] = {}

        def all_well() -> bool:
            seen.update(slurm.nodes() or {})
            return all(node in seen and is_well(seen[node]) for node in nodes)

        if not machine.wait_for(all_well, _READY_S, interval_s=0.1):
            node = next(node for node in nodes if node not in seen or not is_well(seen[node]))
            now = f"{seen[node].state} {seen[node].reason}".strip() if node in seen else "unknown"
            log = self._layout.node(node) / "slurmd.log"
            raise DevClusterError(
                f"node {node} is {now} in Slurm after {_READY_S:g} s; its slurmd's log ends with: "
                f"{machine.last_line(log) or 'nothing'}"
            )

    def _power_off(self, there: ClusterState, node: str) -> None:
        subnet = Subnet(there.index)
        network.cut(subnet, node)
        machine.power_off([self._layout.record(node)])
        network.remove([subnet.port(node)])

    def _restore(self, there: ClusterState, nodes: Sequence[str], lock_fd: int) -> None:
        """Bring back those of the nodes that are switched off, cut off, without slurmd or DOWN."""
        subnet = Subnet(there.index)
        slurm = SlurmClient(self._layout.slurm_conf)
        to_boot = []
        known = slurm.nodes() or {}
        for node in nodes:
            inside = machine.running(self._layout.record(node))
            if inside is None or not machine.has_daemon(inside, "slurmd"):
                self._power_off(there, node)
                files.make_node(self._layout, node, wipe_local=False)
                to_boot.append(node)
                # A real machine takes longer to boot than slurmctld to notice. This one would be back before,
                # in the middle of a job whose processes on it are gone.
                if node in known and known[node].base != "down":
                    slurm.report_lost(node)
            elif not network.is_plugged_in(subnet, node):
                network.heal(subnet, node)
        since = datetime.datetime.fromtimestamp(int(time.time())).isoformat()
        if to_boot:
            programs = preflight.find_programs(*files.PROGRAMS)
            plans = [files.plan(self._layout, node, programs, rebooted=True) for node in to_boot]
            machine.boot(plans, subnet, lock_fd, lambda: None)
        resumed: set[str] = set()

        def is_back(info: NodeInfo) -> bool:
            node = info.name
            if not info.responds or (node in to_boot and info.registered < since):
                return False
            if info.base == "down" and node not in resumed:
                resumed.add(node)
                slurm.resume(node)
            return info.base != "down"

        self._await_nodes(nodes, is_back)

    def _tear_down(self, there: ClusterState | None) -> None:
        """Remove all that a cluster in whatever condition has left; nothing else."""
        if there is not None:
            state.save(self._layout, dataclasses.replace(there, phase=Phase.STOPPING))
            members = (CONTROLLER, *there.node_names)
            if there.boot_id == state.boot_id():
                machine.power_off([self._layout.record(member) for member in members])
            subnet = Subnet(there.index)
            network.remove(name for name in network.interfaces() if subnet.owns(name))
        if self._layout.root.exists():
            files.unmount_below(self._layout.root)
            shutil.rmtree(self._layout.root)

    def _forget(self) -> None:
        """Give the name back: the last step, while the lock is held."""
        self._layout.lock_file.unlink(missing_ok=True)
        try:
            state.BASE.rmdir()
        except OSError:
            return  # other clusters


def _check_shape(nodes: int, gpus_per_node: int) -> None:
    if not 1 <= nodes <= state.MAX_NODES:
        raise DevClusterError(f"--nodes {nodes} is out of range: use 1 to {state.MAX_NODES}")
    if not 0 <= gpus_per_node <= state.MAX_GPUS:
        raise DevClusterError(f"--gpus-per-node {gpus_per_node} is out of range: use 0 to {state.MAX_GPUS}")


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
