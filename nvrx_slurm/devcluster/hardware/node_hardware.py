"""One node's simulated hardware as files, and changing them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.hardware import nvml_sim
from nvrx_slurm.devcluster.hardware.shape import (
    Shape,
    grafts,
    kernel_files,
    kernel_links,
    nvml_values,
)

KERNEL_LOG = "/dev/kmsg"
_NICS = "/sys/class/infiniband"


@dataclass(frozen=True)
class NodeHardware:
    """The files of one node; whoever changes them holds the cluster's lock, or is the only one."""

    directory: Path
    """Mirrors the node: ``sys``, ``proc`` and ``dev`` are below it, and ``nvml``."""
    shape: Shape
    host: str

    @property
    def nvml_state(self) -> Path:
        return self.directory / "nvml"

    def at(self, path: str) -> Path:
        """Where a file of the node's is."""
        return self.directory / path.lstrip("/")

    def heal(self) -> None:
        """Write all files of a healthy node.

        The kernel log forgets what it had, but its numbers go on, as in a real one that has grown.
        """
        self._write_nvml(nvml_values(self.shape, self.host))
        for path, text in kernel_files(self.shape):
            self.write(path, text)
        for path, target in kernel_links(self.shape):
            self._link(path, target)
        self._clear_kernel_log()
        for path in grafts(self.shape):
            if not self.at(path).exists():
                self.at(path).mkdir(parents=True)

    def nvml(self, key: str) -> str | None:
        """Return what the state file has; None: nothing, which is healthy."""
        return self._read_nvml().get(key)

    def set_nvml(self, key: str, value: str | None) -> None:
        """Change the state file; None: healthy again."""
        values = self._read_nvml()
        values.pop(key, None)
        self._write_nvml(values if value is None else {**values, key: value})

    def read(self, path: str) -> str:
        """Return a file of the kernel's; empty if it is not there."""
        try:
            return self.at(path).read_text().strip()
        except FileNotFoundError:
            return ""

    def write(self, path: str, text: str) -> None:
        """Replace a file of the kernel's as a whole."""
        target = self.at(path)
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._replace(target, text + "\n")

    def remove(self, path: str) -> None:
        """Take a file away; fine if it is not there."""
        self.at(path).unlink(missing_ok=True)

    def remove_nic(self, nic: str) -> None:
        """Take an adapter away in one step."""
        gone = self.directory / f".gone-{nic}"
        with contextlib.suppress(FileNotFoundError):
            self.at(f"{_NICS}/{nic}").rename(gone)
            shutil.rmtree(gone)

    def say(self, text: str) -> None:
        """Have the kernel log one line."""
        record = self._record(self._last_sequence() + 1, text)
        with self.at(KERNEL_LOG).open("ab") as log:
            log.write(record)

    def _clear_kernel_log(self) -> None:
        log = self.at(KERNEL_LOG)
        log.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        record = self._record(self._last_sequence() + 1, "nvrx-devcluster: all hardware is well")
        # In place: a file that is mounted over another can't be replaced.
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, record, 0)
            os.ftruncate(descriptor, len(record))
        finally:
            os.close(descriptor)

    def _last_sequence(self) -> int:
        try:
            last = self.at(KERNEL_LOG).read_text().rstrip("\n").rpartition("\n")[2]
        except FileNotFoundError:
            return -1
        return int(last.split(",")[1])

    def _record(self, sequence: int, text: str) -> bytes:
        # Facility 0, the kernel; severity 3, an error; microseconds since boot.
        return f"3,{sequence},{time.monotonic_ns() // 1000},-;{text}\n".encode()

    def _read_nvml(self) -> dict[str, str]:
        try:
            return nvml_sim.parse_state(self.nvml_state.read_text())
        except (OSError, ValueError) as error:
            raise DevClusterError(f"{self.nvml_state}: {error}: heal the node first") from error

    def _write_nvml(self, values: dict[str, str]) -> None:
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._replace(self.nvml_state, nvml_sim.state_text(values))

    def _replace(self, target: Path, text: str) -> None:
        # Not beside the target, where a reader that lists the directory would meet it.
        fresh = self.directory / ".new"
        fresh.write_text(text)
        fresh.chmod(0o644)
        fresh.replace(target)

    def _link(self, path: str, target: str) -> None:
        link = self.at(path)
        link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target)
