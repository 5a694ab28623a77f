"""How modest the worker is beside training. Needs no torch."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from numbers import Integral, Real

from nvrx_slurm import linux


@dataclass(frozen=True)
class WorkerPriority:
    """How modest the worker is beside training."""

    nice: int = 10
    """0 to 19 (nice(2)); never less nice than the trainer."""
    io_class: int | None = None
    """ioprio_set(2): 1 real time, 2 best effort, 3 idle; None leaves it alone."""
    cpus: tuple[int, ...] = ()
    """The cores that it may use (sched_setaffinity(2)); empty: those of the trainer."""
    bytes_per_s: int | None = None
    """How fast it writes files, at most; None for as fast as it can."""

    def __post_init__(self) -> None:
        for name, value in (
            ("cpu_priority", self.nice),
            ("io_priority", self.io_class),
            ("max_bytes_per_s", self.bytes_per_s),
        ):
            if value is not None and not isinstance(value, Real):
                raise TypeError(f"{name} is {value!r}, a number is accepted")
        if not all(isinstance(cpu, Integral) for cpu in self.cpus):
            raise TypeError(f"cpu_affinity is {list(self.cpus)}, numbers of cores from 0 are accepted")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"cpu_priority is {self.nice}, 0 to 19 is accepted")
        if self.io_class not in (None, 0, 1, 2, 3):
            raise ValueError(f"io_priority is {self.io_class}, None or 0 to 3 is accepted")
        if any(cpu < 0 for cpu in self.cpus):
            raise ValueError(f"cpu_affinity is {list(self.cpus)}, numbers of cores from 0 are accepted")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"max_bytes_per_s is {self.bytes_per_s}, None or a number above 0 is accepted")

    def apply(self) -> None:
        """Make it that of this process; what the system refuses is said on stderr."""
        with contextlib.suppress(OSError):
            os.nice(max(0, self.nice - os.nice(0)))
        if self.io_class:
            try:
                linux.set_io_priority(self.io_class)
            except OSError as error:
                print(f"nvrx: checkpoint worker: I/O priority {self.io_class}: {error}", file=sys.stderr)
        if self.cpus:
            try:
                os.sched_setaffinity(0, self.cpus)
            except OSError as error:
                print(f"nvrx: checkpoint worker: cores {list(self.cpus)}: {error}", file=sys.stderr)
