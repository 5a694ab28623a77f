"""Where a cluster keeps its files, what it remembers, and who may change it.

``state.json`` is written before anything else happens, and everything that a cluster creates on the machine
(interfaces, processes, files) can be derived from it and from the process records. So ``down`` can clean up
after an ``up`` that was killed at any point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.hardware.shape import Shape

BASE = Path("/var/lib/nvrx-devcluster")
"""Every cluster has one directory below this one; the last ``down`` removes it."""

CONTROLLER = "ctl"
MAX_NODES = 64
MAX_GPUS = 16
_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}\Z")


class Phase(str, enum.Enum):
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"


@dataclasses.dataclass(frozen=True)
class ClusterState:
    """What a cluster is: enough to find everything that belongs to it."""

    name: str
    index: int
    """The slot among the clusters of this machine: subnet and interface names follow from it."""
    nodes: int
    gpus_per_node: int
    shares: tuple[str, ...]
    """Directories that the nodes share with the machine in spite of lying where each node has its own."""
    phase: Phase
    boot_id: str
    nics: int | None = None
    """Of the simulated hardware of each node; None: the nodes have none but device files for Slurm."""
    slurm_conf: tuple[str, ...] = ()
    """Lines of the caller's own at the end of slurm.conf."""

    @property
    def hardware(self) -> Shape | None:
        return None if self.nics is None else Shape(gpus=self.gpus_per_node, nics=self.nics)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "phase": self.phase.value}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ClusterState:
        """Read what this or another version wrote: a cluster has to be taken down with the one at hand.

        Raises:
            ValueError, KeyError, TypeError: it has not even what that takes.
        """
        fields = json.loads(text)
        return cls(
            name=str(fields["name"]),
            index=int(fields["index"]),
            nodes=int(fields["nodes"]),
            gpus_per_node=int(fields["gpus_per_node"]),
            shares=tuple(fields.get("shares", ())),
            phase=Phase(fields["phase"]),
            boot_id=str(fields["boot_id"]),
            nics=None if fields.get("nics") is None else int(fields["nics"]),
            slurm_conf=tuple(fields.get("slurm_conf", ())),
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """The paths of one cluster."""

    root: Path

    @classmethod
    def of(cls, name: str) -> Layout:
        return cls(BASE / name)

    @property
    def state_file(self) -> Path:
        return self.root / "state.json"

    @property
    def lock_file(self) -> Path:
        return self.root.with_name(f"{self.root.name}.lock")

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.etc / "hosts"

    @property
    def gpus(self) -> Path:
        return self.root / "gpus"

    @property
    def nvml(self) -> Path:
        """The simulated library."""
        return self.root / "nvml"

    @property
    def linker_cache(self) -> Path:
        """With which the nodes find it."""
        return self.etc / "ld.so.cache"

    @property
    def storage(self) -> Path:
        """What all nodes with simulated hardware share at /storage."""
        return self.root / "storage"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def munge_key(self) -> Path:
        return self.etc / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """The controller's, and the host's; inside a node the node's own appears at this path."""
        return self.munge / "munge.socket"

    @property
    def controller(self) -> Path:
        return self.root / CONTROLLER

    @property
    def records(self) -> Path:
        """One process record per running machine."""
        return self.root / "pids"

    def record(self, machine: str) -> Path:
        return self.records / f"{machine}.pid"

    def machine(self, member: str) -> Path:
        return self.controller if member == CONTROLLER else self.node(member)

    def console(self, member: str) -> Path:
        """What the machine's first process and its daemons print."""
        return self.machine(member) / "console.log"

    def node(self, node: str) -> Path:
        return self.root / "nodes" / node

    def node_run(self, node: str) -> Path:
        """Per-node state, inside the node at /run/nvrx-node."""
        return self.node(node) / "run"

    def node_local(self, node: str) -> Path:
        """The node's local disk, inside the node at /local."""
        return self.node(node) / "local"

    def node_munge(self, node: str) -> Path:
        return self.node(node) / "munge"

    def node_spool(self, node: str) -> Path:
        return self.node(node) / "spool"


def check_name(name: str) -> str:
    """
    Raises:
        DevClusterError: not a name for a cluster.
    """
    if not _NAME.match(name):
        raise DevClusterError(
            f"--name {name!r} is no cluster name: use 1 to 24 of a-z, 0-9 and '-', beginning with a letter"
        )
    return name


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def load(layout: Layout) -> ClusterState | None:
    """The remembered state; None when this cluster does not exist.

    Raises:
        DevClusterError: the file is there, but was not written by this version.
    """
    try:
        return ClusterState.from_json(layout.state_file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DevClusterError(
            f"{layout.state_file} is not the state of a cluster ({error!r}): take {layout.root.name!r} down "
            f"with the version of nvrx-devcluster that started it"
        ) from error


def save(layout: Layout, state: ClusterState) -> None:
    """Replace the state in one step: a reader or a crash sees the old or the new one."""
    fresh = layout.state_file.with_suffix(".new")
    fresh.write_text(state.to_json())
    fresh.chmod(0o644)
    fresh.replace(layout.state_file)


def used_slots() -> tuple[int, ...]:
    """The slots of this machine's clusters, as far as their states can be read.

    The names of the others' interfaces keep their slots too.
    """
    found = []
    for file in BASE.glob("*/state.json"):
        with contextlib.suppress(DevClusterError):
            if (state := load(Layout(file.parent))) is not None:
                found.append(state.index)
    return tuple(found)


@contextlib.contextmanager
def allocation_lock() -> Iterator[None]:
    """Held while a new cluster picks its slot, so that two of them never pick the same one."""
    while True:
        BASE.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            fd = os.open(BASE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another cluster's `down` has just removed it
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, BASE):
                BASE.chmod(0o755)
                yield
                return
        finally:
            os.close(fd)


@contextlib.contextmanager
def cluster_lock(layout: Layout, command: str, patience_s: float) -> Iterator[int]:
    """Make this process the only one that changes the cluster; gives the lock's file descriptor.

    A child that inherits the descriptor holds the lock too. When the cluster does not exist at the end, the
    lock file goes too.

    Raises:
        DevClusterError: another command still works on this cluster after ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fd = os.open(layout.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            BASE.mkdir(mode=0o755, parents=True, exist_ok=True)
            continue
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _busy(layout, fd) from None
                time.sleep(0.02)
                continue
            if not _is_at(fd, layout.lock_file):
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{command}, process {os.getpid()}".encode(), 0)
            try:
                yield fd
            finally:
                if not layout.root.exists():
                    layout.lock_file.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # other clusters
                        BASE.rmdir()
            return
        finally:
            os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file still is the one at ``path`` (whoever held the lock may have removed it)."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _busy(layout: Layout, fd: int) -> DevClusterError:
    holder = os.pread(fd, 200, 0).decode(errors="replace") or "just starting"
    return DevClusterError(
        f"another nvrx-devcluster command ({holder}) is working on cluster {layout.root.name!r}: "
        f"wait until it has finished, or choose another --name"
    )
