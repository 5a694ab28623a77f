"""A node as the checks see it. Everything from outside comes in through here.

The protocols are few and small; :mod:`nvrx_slurm.testing.health` has a fake of each.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Protocol

from nvrx_slurm.health.baseline import Baseline
from nvrx_slurm.health.kernel_log import KernelLog, KernelLogFile, KernelRecord
from nvrx_slurm.health.nvml import Nvml, NvmlError, RealNvml
from nvrx_slurm.health.programs import Programs, RealPrograms
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.state import StateDir
from nvrx_slurm.health.tree import Tree
from nvrx_slurm.health.unavailable import UnavailableError


class Clock(Protocol):
    """Time."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    def since_boot(self) -> float:
        """Seconds, as the kernel log counts them (CLOCK_MONOTONIC)."""
        ...


class RealClock:
    def now(self) -> float:
        return time.time()

    def since_boot(self) -> float:
        return time.monotonic()


@dataclass(frozen=True)
class JobContext:
    """The job that the checks are run for; all empty when there is none."""

    job_id: str = ""
    uid: int | None = None
    started: float | None = None
    """Unix seconds."""
    gpus: tuple[int, ...] | None = None
    """Indexes of the GPUs of this node that Slurm gave it; None: not told."""
    gpu_count: int | None = None
    """How many they are."""
    accused: bool = False
    """The job has held this node to be the cause of its faults."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> JobContext:
        """Read what Slurm tells hooks, tasks and batch scripts; nonsense counts as not told."""

        def number(name: str) -> int | None:
            text = environ.get(name, "")
            return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None

        listed = environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS") or ""
        words = listed.split(",")
        gpus = tuple(int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 4)
        told = bool(gpus) and len(gpus) == len(words)
        return cls(
            job_id=environ.get("SLURM_JOB_ID", ""),
            uid=number("SLURM_JOB_UID"),
            started=number("SLURM_JOB_START_TIME"),
            gpus=gpus if told else None,
            gpu_count=len(gpus) if told else number("SLURM_GPUS_ON_NODE"),
        )


class ControllerClock(Protocol):
    """The time on the Slurm controller."""

    def now(self) -> float:
        """Unix seconds, exact to one.

        Raises:
            UnavailableError: there is no Slurm, or it does not answer.
        """
        ...


@dataclass(frozen=True)
class ScontrolClock:
    """Asks ``scontrol show config``, whose first line is the controller's time.

    Args:
        scontrol: its name or path.
        slurm_conf: empty: where Slurm looks for it by itself.
    """

    programs: Programs = field(default_factory=RealPrograms)
    scontrol: str = "scontrol"
    slurm_conf: str = ""
    timeout_s: float = 5.0

    def now(self) -> float:
        """See :meth:`ControllerClock.now`."""
        argv = (self.scontrol, "show", "config")
        # In UTC there is no hour that comes twice.
        environ = {"TZ": "UTC0", **({"SLURM_CONF": self.slurm_conf} if self.slurm_conf else {})}
        done = self.programs.run(argv, self.timeout_s, environ)
        written = done.output.partition("\n")[0].rpartition(" ")[2]
        try:
            return datetime.strptime(written, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
        except ValueError:
            said = (done.output or done.errors).partition("\n")[0][:80]
            raise UnavailableError(f"tells no time: {said!r}", " ".join(argv)) from None


@dataclass(frozen=True)
class Node:
    """One node at the time of one run of its checks."""

    stage: Stage
    host: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])
    tree: Tree = field(default_factory=Tree)
    clock: Clock = field(default_factory=RealClock)
    programs: Programs = field(default_factory=RealPrograms)
    kernel_log: KernelLog = field(default_factory=KernelLogFile)
    controller: ControllerClock = field(default_factory=ScontrolClock)
    open_nvml: Callable[[], Nvml] = RealNvml
    state: StateDir = field(default_factory=lambda: StateDir(None))
    """Where things are remembered from run to run."""
    job: JobContext = field(default_factory=JobContext)
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)

    @cached_property
    def nvml(self) -> Nvml:
        """The node's GPUs; opened once per process.

        Raises:
            UnavailableError: no NVIDIA driver, or it does not answer.
        """
        try:
            return self.open_nvml()
        except NvmlError as error:
            raise UnavailableError(f"NVML does not start: {error}", "nvmlInit", expected=True) from error

    @cached_property
    def boot_id(self) -> str:
        """The kernel's name for this boot; empty where it can't be read."""
        try:
            return self.tree.text("/proc/sys/kernel/random/boot_id")
        except UnavailableError:
            return ""

    @cached_property
    def baseline(self) -> Baseline | None:
        """What ``nvrx-health baseline`` found; None without one that can be read."""
        return Baseline.load(self.state)

    @property
    def baseline_of_this_boot(self) -> Baseline | None:
        """The same, unless counters have begun anew since."""
        found = self.baseline
        return found if found is not None and found.boot_id == self.boot_id else None

    def at_boot_time(self, unix: float) -> float:
        """Return ``unix`` as seconds since boot."""
        return self.clock.since_boot() - (self.clock.now() - unix)

    def recent_kernel_records(self) -> list[KernelRecord]:
        """Return what the kernel said since the baseline: since the node was last known to be good.

        So a repaired node is not blamed again for what is still in the log. Without a baseline of this boot:
        since the job began, and before it begins all of this boot. With one the job's start is no bound: what
        an idle node has logged is what a prolog looks for, and clocks jump.

        Raises:
            UnavailableError: the log can't be read.
        """
        baseline = self.baseline_of_this_boot
        after = baseline.kernel_log_sequence if baseline is not None else None
        if after is not None:
            return [record for record in self.kernel_log.records() if record.sequence > after]
        if self.job.started is None or self.stage is Stage.PROLOG:
            return list(self.kernel_log.records())
        since = self.at_boot_time(self.job.started)
        return [record for record in self.kernel_log.records() if record.seconds >= since]
