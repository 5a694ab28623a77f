"""The dev cluster as its users see it: up, down, and what can happen to its nodes in between."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm.devcluster import files, lifecycle, machine, network, preflight, state, status
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.hardware import NodeHardware, parse_fault, storage
from nvrx_slurm.devcluster.hardware.shape import MOST_NICS
from nvrx_slurm.devcluster.hardware.storage import Storage
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.process import ProcessRecord
from nvrx_slurm.devcluster.state import ClusterState, Layout, Phase

_STORAGE_S = 20.0
_QUEUE_S = 60.0
"""How long a command waits for another one that works on the same cluster; ``up`` does not wait."""


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

    def environment(self) -> dict[str, str]:
        """What to add to the environment of Slurm's commands so that they talk to this cluster."""
        self._require()
        return {"SLURM_CONF": str(self._layout.slurm_conf)}

    def run_dir_of(self, node: str) -> Path:
        """The directory of a node's simulated state, which the node sees at /run/nvrx-node.

        It outlives ``kill_node`` and ``restore_node`` and is removed by ``down``.
        """
        return self._layout.node_run(self._node(self._require(), node))

    def local_dir_of(self, node: str) -> Path:
        """The node's local disk, which the node sees at /local."""
        return self._layout.node_local(self._node(self._require(), node))

    def up(
        self,
        nodes: int = 4,
        gpus_per_node: int = 2,
        share: Sequence[os.PathLike[str] | str] = (),
        slurm_conf: Sequence[str] = (),
        *,
        nics: int | None = None,
    ) -> None:
        """Start the cluster, and return when every node is idle.

        A cluster of the same shape that is already there is used again; nodes of it that were killed or cut
        off are restored. When the start fails, nothing of it remains.

        Args:
            share: directories below /tmp, /run, /local or /dev/shm, which are private in each node, that the
                nodes shall see all the same. This package and its virtual environment are always among them.
            nics: gives the nodes simulated hardware, with so many network adapters, and NVLinks between the
                GPUs; None: they have none, and GPUs are device files that only Slurm looks at.
            slurm_conf: lines for the end of slurm.conf, such as ``Prolog=/etc/nvrx/prolog.d/*``.
        """
        _check_shape(nodes, gpus_per_node, nics)
        lines = _checked_lines(slurm_conf)
        shares = files.shared_directories(share)
        preflight.require_root("nvrx-devcluster up")
        with state.cluster_lock(self._layout, "up", 0.0) as lock_fd:
            there = state.load(self._layout)
            if there is not None and status.is_running(self._layout, there):
                self._check_same(there, nodes, gpus_per_node, nics, shares, lines)
                lifecycle.restore(self._layout, there, there.node_names, lock_fd)
                return
            lifecycle.tear_down(self._layout)
            try:
                lifecycle.start(self._layout, nodes, gpus_per_node, nics, shares, lines, lock_fd)
            except BaseException:
                lifecycle.tear_down(self._layout)
                raise

    def down(self) -> bool:
        """Stop everything and remove every trace; False when there was nothing."""
        if not self._layout.root.exists() and not self._layout.lock_file.exists():
            return False
        preflight.require_root("nvrx-devcluster down")
        with state.cluster_lock(self._layout, "down", _QUEUE_S):
            was_there = self._layout.root.exists()
            lifecycle.tear_down(self._layout)
        return was_there

    def status(self) -> status.ClusterStatus | None:
        """How the cluster is; None when there is none of this name."""
        there = state.load(self._layout)
        return None if there is None else status.describe(self._layout, there)

    def kill_node(self, node: str) -> None:
        """Cut the node's power: its cable first, so that its peers hear nothing, then every process of it."""
        preflight.require_root("nvrx-devcluster kill-node")
        self._require()
        with state.cluster_lock(self._layout, "kill-node", _QUEUE_S):
            there = self._require()
            lifecycle.power_off(self._layout, there, self._node(there, node))

    def partition_node(self, node: str) -> None:
        """Cut the node's network; its processes go on."""
        preflight.require_root("nvrx-devcluster partition-node")
        self._require()
        with state.cluster_lock(self._layout, "partition-node", _QUEUE_S):
            there = self._require()
            node = self._node(there, node)
            self._require_power(node)
            network.cut(Subnet(there.index), node)

    def restore_node(self, node: str, wipe_local: bool = False, *, unnoticed: bool = False) -> None:
        """Boot a killed node, plug a partitioned one in again, and return it to service in Slurm.

        Returns when slurmctld has it back. A node that is well stays as it is; one that someone drained
        stays drained.

        Args:
            wipe_local: the killed node comes back with an empty local disk.
            unnoticed: the killed node boots before Slurm has missed it. Jobs that were submitted with
                ``--no-kill`` keep it then; they lose a node that Slurm has called DOWN.
        """
        preflight.require_root("nvrx-devcluster restore-node")
        self._require()
        with state.cluster_lock(self._layout, "restore-node", _QUEUE_S) as lock_fd:
            there = self._require()
            node = self._node(there, node)
            if wipe_local:
                if machine.running(self._layout.record(node)):
                    raise DevClusterError(f"node {node} is running: kill it before wiping its local disk")
                files.wipe_disks(self._layout, node)
            lifecycle.restore(self._layout, there, (node,), lock_fd, unnoticed)

    def inject(self, node: str, faults: Sequence[str]) -> None:
        """Break a node's simulated hardware, see ``docs/devcluster.md`` for what can be done to it.

        All faults are understood before the first is done. They outlive a loss of power, except that of the
        storage.
        """
        preflight.require_root("nvrx-devcluster inject")
        self._require()
        with state.cluster_lock(self._layout, "inject", _QUEUE_S):
            hardware = self._hardware(self._require(), node)
            parsed = [parse_fault(fault, hardware.shape) for fault in faults]
            for fault in parsed:
                if fault.storage is not None:
                    self._set_storage(hardware.host, fault.storage)
                else:
                    fault.apply(hardware)

    def heal(self, node: str) -> None:
        """Make all simulated hardware of a node as it was at the start. What Slurm thinks of it stays."""
        preflight.require_root("nvrx-devcluster heal")
        self._require()
        with state.cluster_lock(self._layout, "heal", _QUEUE_S):
            hardware = self._hardware(self._require(), node)
            hardware.heal()
            if machine.running(self._layout.record(hardware.host)):
                self._set_storage(hardware.host, Storage.OK)

    def _hardware(self, there: ClusterState, node: str) -> NodeHardware:
        node = self._node(there, node)
        if there.hardware is None:
            raise DevClusterError(
                f"the nodes of cluster {self.name!r} have no simulated hardware: "
                f"start it with nvrx-devcluster up --hardware"
            )
        return files.node_hardware(self._layout, there.hardware, node)

    def _set_storage(self, node: str, mode: Storage) -> None:
        script = [sys.executable, "-I", "-S", storage.__file__, mode.value, storage.MOUNT_POINT]
        command = machine.enter(self._require_power(node), script, "/")
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STORAGE_S, check=False)
        if done.returncode != 0:
            raise DevClusterError(
                f"the storage of node {node} can't be made {mode.value}: {done.stderr.strip()}"
            )

    def exec(self, node: str, argv: Sequence[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command inside a node, as root, in the same directory if the node has it.

        Args:
            kwargs: as for subprocess.run; ``env`` replaces the environment that has SLURM_CONF in it.
        """
        there = self._require()
        preflight.require_root("nvrx-devcluster exec")
        inside = self._require_power(self._node(there, node))
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

    def _check_same(
        self,
        there: ClusterState,
        nodes: int,
        gpus_per_node: int,
        nics: int | None,
        shares: tuple[str, ...],
        slurm_conf: tuple[str, ...],
    ) -> None:
        if (there.nodes, there.gpus_per_node, there.nics) != (nodes, gpus_per_node, nics):
            has = (
                "without simulated hardware" if there.nics is None else f"with {there.nics} network adapters"
            )
            hardware = "" if there.nics == nics else f" {has}"
            raise DevClusterError(
                f"cluster {self.name!r} is already up with {there.nodes} nodes of {there.gpus_per_node} "
                f"GPUs{hardware}: take it down first, or choose another --name"
            )
        if there.slurm_conf != slurm_conf:
            raise DevClusterError(
                f"cluster {self.name!r} is already up with other lines of slurm.conf: "
                f"take it down first, or choose another --name"
            )
        unseen = [
            share for share in shares if not any(Path(share).is_relative_to(seen) for seen in there.shares)
        ]
        if unseen:
            raise DevClusterError(
                f"cluster {self.name!r} is already up, but its nodes do not see {', '.join(unseen)}: "
                f"take it down first, or choose another --name"
            )


def _check_shape(nodes: int, gpus_per_node: int, nics: int | None) -> None:
    if nics is not None and not 0 <= nics <= MOST_NICS:
        raise DevClusterError(f"--nics {nics} is out of range: use 0 to {MOST_NICS}")
    if not 1 <= nodes <= state.MAX_NODES:
        raise DevClusterError(f"--nodes {nodes} is out of range: use 1 to {state.MAX_NODES}")
    if not 0 <= gpus_per_node <= state.MAX_GPUS:
        raise DevClusterError(f"--gpus-per-node {gpus_per_node} is out of range: use 0 to {state.MAX_GPUS}")


def _checked_lines(slurm_conf: Sequence[str]) -> tuple[str, ...]:
    for line in slurm_conf:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*=[^\n\r]*", line):
            raise DevClusterError(f"--slurm-conf {line!r} is no line of slurm.conf: use NAME=VALUE")
    return tuple(slurm_conf)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
