"""The files of a cluster on disk, and the plans of its machines that refer to them."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import nvrx_slurm
from nvrx_slurm.devcluster import config, preflight
from nvrx_slurm.devcluster.config import SlurmVersion
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.hardware import NodeHardware, Shape, build_library
from nvrx_slurm.devcluster.hardware.nvml_sim import make_linker_cache
from nvrx_slurm.devcluster.hardware.shape import grafts
from nvrx_slurm.devcluster.hardware.storage import MOUNT_POINT
from nvrx_slurm.devcluster.machine import Plan, Service
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.state import CONTROLLER, ClusterState, Layout

PROGRAMS = ("slurmctld", "slurmd", "munged", "scontrol", "srun", "ip", "nsenter")

PRIVATE = ("/tmp", "/run", "/local", "/dev/shm")
"""Every node has its own of these."""
NODE_RUN = "/run/nvrx-node"
NODE_LOCAL = "/local"


def shared_directories(wanted: Sequence[os.PathLike[str] | str]) -> tuple[str, ...]:
    """Those directories that have to be shared one by one: they lie where every node has its own.

    Args:
        wanted: besides this package, its virtual environment and its interpreter.

    Raises:
        DevClusterError: one cannot be shared.
    """
    found = set()
    for path in (Path(nvrx_slurm.__file__).parents[1], sys.prefix, sys.base_prefix, *wanted):
        real = Path(path).resolve()
        if not real.is_dir():
            raise DevClusterError(f"--share {path}: there is no such directory")
        if str(real) in PRIVATE:
            raise DevClusterError(f"--share {path}: each node has its own; name a directory below it")
        if any(real.is_relative_to(private) for private in PRIVATE):
            found.add(real)
    return tuple(
        str(path)
        for path in sorted(found)
        if not any(path != other and path.is_relative_to(other) for other in found)
    )


def make_cluster(
    layout: Layout, state: ClusterState, subnet: Subnet, version: SlurmVersion, machine: str
) -> None:
    """Write everything that has to be there before the first machine boots."""
    for directory in (layout.etc, layout.munge, layout.controller, layout.records, layout.gpus):
        _directory(directory)
    _directory(layout.controller / "state", 0o700)
    texts = {
        "slurm.conf": config.slurm_conf(state, layout, subnet),
        "gres.conf": config.gres_conf(state, layout),
        "cgroup.conf": config.cgroup_conf(version),
        "hosts": config.hosts(state, subnet, machine),
    }
    for name, text in texts.items():
        path = layout.etc / name
        path.write_text(text)
        path.chmod(0o644)
    key = os.open(layout.munge_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    try:
        os.write(key, os.urandom(128))
    finally:
        os.close(key)
    for gpu in range(state.gpus_per_node):
        _null_device(layout.gpus / f"nvidia{gpu}")
    if state.hardware is not None:
        _directory(layout.storage, 0o1777)
        make_linker_cache(build_library(layout.nvml), layout.linker_cache)
    _directory(layout.root / "nodes")
    for node in state.node_names:
        make_node(layout, node)
        if state.hardware is not None:
            node_hardware(layout, state.hardware, node).heal()


def node_hardware(layout: Layout, shape: Shape, node: str) -> NodeHardware:
    """The node's simulated hardware, as files."""
    return NodeHardware(layout.node_run(node), shape, node)


def make_node(layout: Layout, node: str) -> None:
    """Those of the node's directories that are not there yet."""
    _directory(layout.node(node))
    _directory(layout.node_run(node))
    _directory(layout.node_spool(node))
    _directory(layout.node_munge(node))
    _directory(layout.node_local(node), 0o1777)


def wipe_disks(layout: Layout, node: str) -> None:
    """All that the node keeps on its own disk: the user's files and Slurm's."""
    for disk in (layout.node_local(node), layout.node_spool(node)):
        if disk.exists():
            shutil.rmtree(disk)


def plan(
    layout: Layout, there: ClusterState, member: str, programs: dict[str, str], rebooted: bool = False
) -> Plan:
    """How to boot one machine of the cluster."""
    hardware: list[tuple[Path, str]] = []
    if member == CONTROLLER:
        binds = []
        daemon = Service((programs["slurmctld"], "-D"))
    else:
        # Slurm looks for munged at one path everywhere, but each node has its own: they must not share their
        # memory of the credentials already used, and a node's must go down with it.
        binds = [
            (layout.node_munge(member), str(layout.munge)),
            (layout.node_run(member), NODE_RUN),
            (layout.node_local(member), NODE_LOCAL),
        ]
        if there.hardware is not None:
            binds.append((layout.storage, MOUNT_POINT))
            hardware = _hardware_mounts(layout, there.hardware, member)
        # -b: report a boot now, where the machine's own boot time would hide that the node was away.
        daemon = Service((programs["slurmd"], "-D", *(["-b"] if rebooted else [])))
    return Plan(
        name=member,
        record=layout.record(member),
        console=layout.console(member),
        binds=((layout.hosts, "/etc/hosts"), *binds),
        shares=there.shares,
        grafts=tuple(hardware),
        services=(_munged(layout, programs["munged"]), daemon),
        environment={
            "PATH": preflight.SYSTEM_DIRECTORIES,
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(layout.slurm_conf),
        },
        ip=programs["ip"],
    )


def _hardware_mounts(layout: Layout, shape: Shape, node: str) -> list[tuple[Path, str]]:
    files = node_hardware(layout, shape, node)
    return [(layout.linker_cache, "/etc/ld.so.cache"), *((files.at(path), path) for path in grafts(shape))]


def _munged(layout: Layout, program: str) -> Service:
    argv = (
        *(program, "--foreground", f"--socket={layout.munge_socket}", f"--key-file={layout.munge_key}"),
        *(f"--seed-file={layout.munge / 'munged.seed'}", f"--log-file={layout.munge / 'munged.log'}"),
        f"--pid-file={layout.munge / 'munged.pid'}",
    )
    return Service(argv, socket=str(layout.munge_socket))


def unmount_below(root: Path) -> None:
    """Let go of everything that is mounted inside a cluster's own directory."""
    with open("/proc/self/mountinfo") as table:
        points = [line.split()[4] for line in table]
    libc = ctypes.CDLL(None, use_errno=True)
    for point in reversed(points):
        if point.startswith(f"{root}/") and libc.umount2(point.encode(), 2) != 0:  # MNT_DETACH
            raise DevClusterError(f"cannot unmount {point}: {os.strerror(ctypes.get_errno())}")


def _directory(path: Path, mode: int = 0o755) -> None:
    path.mkdir(exist_ok=True)
    path.chmod(mode)  # whatever the umask is


def _null_device(path: Path) -> None:
    """What a GPU's device file is to Slurm; whoever opens it finds /dev/null."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError as error:
        raise DevClusterError(
            f"cannot make the device file {path} ({error.strerror}): inside a container, run a privileged "
            f"one, or start the cluster with --gpus-per-node 0"
        ) from error
    path.chmod(0o666)
