"""A node that is a few Python objects and a directory of small files: what the health checks look at."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nvrx_slurm.health.kernel_log import KernelRecord
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import (
    FabricState,
    GpuMemory,
    NvLinkCounter,
    Nvml,
    NvmlCode,
    NvmlError,
    PcieLink,
    RemappedRows,
)
from nvrx_slurm.health.programs import Finished
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.state import StateDir
from nvrx_slurm.health.tree import Tree
from nvrx_slurm.health.unavailable import UnavailableError

_T = TypeVar("_T")
BOOT_ID = "7f1e8a52-0c7e-4a57-9f0d-3f6a1f6a2b11"
_GIB = 1 << 30


@dataclass
class FakeGpu:
    """One healthy GPU; change what is to be different."""

    uuid: str
    pci_bus_id: str = "0000:1b:00.0"
    recovery_action: int = 0
    uncorrected_ecc: int = 0
    remapped_rows: RemappedRows = field(
        default_factory=lambda: RemappedRows(0, 0, pending=False, failure=False)
    )
    retired_pages_pending: bool = False
    throttle_reasons: int = 0x1
    sm_clock_mhz: tuple[int, int] = (1980, 1980)
    temperature_c: int = 41
    pcie_link: PcieLink = field(default_factory=lambda: PcieLink(5, 5, 16, 16))
    utilization: int = 0
    processes: list[int] = field(default_factory=list)
    mig_enabled: bool = False
    memory: GpuMemory = field(default_factory=lambda: GpuMemory(80 * _GIB, 0))
    fabric: FabricState = field(default_factory=lambda: FabricState(3, 0))
    links: dict[int, bool] = field(default_factory=lambda: dict.fromkeys(range(18), True))
    link_errors: dict[int, dict[NvLinkCounter, int]] = field(default_factory=dict)


class FakeNvml:
    """A :class:`~nvrx_slurm.health.nvml.Nvml` over :class:`FakeGpu`.

    :attr:`errors` makes calls fail: ``{"uuid": 15}`` for every GPU, ``{("uuid", 3): 15}`` for one.
    :attr:`asked` counts calls by name.
    """

    def __init__(self, gpus: int = 8, driver: str = "580.95.05") -> None:
        self.gpus = [FakeGpu(f"GPU-{n}", f"0000:{0x1B + n:02x}:00.0") for n in range(gpus)]
        self.driver = driver
        self.errors: dict[str | tuple[str, int], int] = {}
        self.asked: Counter[str] = Counter()

    def _answer(self, call: str, gpu: int | None, value: Callable[[], _T]) -> _T:
        self.asked[call] += 1
        code = self.errors.get(call)
        if gpu is not None:
            code = self.errors.get((call, gpu), code)
        if code is not None:
            raise NvmlError(code)
        return value()

    def driver_version(self) -> str:
        return self._answer("driver_version", None, lambda: self.driver)

    def count(self) -> int:
        return self._answer("count", None, lambda: len(self.gpus))

    def uuid(self, gpu: int) -> str:
        return self._answer("uuid", gpu, lambda: self.gpus[gpu].uuid)

    def pci_bus_id(self, gpu: int) -> str:
        return self._answer("pci_bus_id", gpu, lambda: self.gpus[gpu].pci_bus_id)

    def recovery_action(self, gpu: int) -> int:
        return self._answer("recovery_action", gpu, lambda: self.gpus[gpu].recovery_action)

    def uncorrected_ecc(self, gpu: int) -> int:
        return self._answer("uncorrected_ecc", gpu, lambda: self.gpus[gpu].uncorrected_ecc)

    def remapped_rows(self, gpu: int) -> RemappedRows:
        return self._answer("remapped_rows", gpu, lambda: self.gpus[gpu].remapped_rows)

    def retired_pages_pending(self, gpu: int) -> bool:
        return self._answer("retired_pages_pending", gpu, lambda: self.gpus[gpu].retired_pages_pending)

    def sm_clock_mhz(self, gpu: int) -> tuple[int, int]:
        return self._answer("sm_clock_mhz", gpu, lambda: self.gpus[gpu].sm_clock_mhz)

    def temperature_c(self, gpu: int) -> int:
        return self._answer("temperature_c", gpu, lambda: self.gpus[gpu].temperature_c)

    def throttle_reasons(self, gpu: int) -> int:
        return self._answer("throttle_reasons", gpu, lambda: self.gpus[gpu].throttle_reasons)

    def pcie_link(self, gpu: int) -> PcieLink:
        return self._answer("pcie_link", gpu, lambda: self.gpus[gpu].pcie_link)

    def utilization(self, gpu: int) -> int:
        return self._answer("utilization", gpu, lambda: self.gpus[gpu].utilization)

    def processes(self, gpu: int) -> list[int]:
        return self._answer("processes", gpu, lambda: list(self.gpus[gpu].processes))

    def mig_enabled(self, gpu: int) -> bool:
        return self._answer("mig_enabled", gpu, lambda: self.gpus[gpu].mig_enabled)

    def memory(self, gpu: int) -> GpuMemory:
        return self._answer("memory", gpu, lambda: self.gpus[gpu].memory)

    def fabric(self, gpu: int) -> FabricState:
        return self._answer("fabric", gpu, lambda: self.gpus[gpu].fabric)

    def nvlink_active(self, gpu: int, link: int) -> bool:
        def value() -> bool:
            if link not in self.gpus[gpu].links:
                raise NvmlError(NvmlCode.INVALID_ARGUMENT)
            return self.gpus[gpu].links[link]

        return self._answer("nvlink_active", gpu, value)

    def nvlink_errors(self, gpu: int, link: int) -> dict[NvLinkCounter, int]:
        none = dict.fromkeys(NvLinkCounter, 0)
        return self._answer("nvlink_errors", gpu, lambda: self.gpus[gpu].link_errors.get(link, none))


@dataclass
class FakeClock:
    """Stands still."""

    unix: float = 1_795_982_672.0
    boot: float = 100_000.0
    """Seconds since boot."""

    def now(self) -> float:
        return self.unix

    def since_boot(self) -> float:
        return self.boot

    def advance(self, seconds: float) -> None:
        self.unix += seconds
        self.boot += seconds


@dataclass
class FakeControllerClock:
    clock: FakeClock
    ahead_s: float = 0.0
    unavailable: UnavailableError | None = None

    def now(self) -> float:
        if self.unavailable is not None:
            raise self.unavailable
        return float(int(self.clock.now() + self.ahead_s))


@dataclass
class FakeKernelLog:
    """What :meth:`say` has put there."""

    clock: FakeClock
    written: list[KernelRecord] = field(default_factory=list)
    unavailable: UnavailableError | None = None

    def say(self, text: str) -> None:
        self.written.append(KernelRecord(len(self.written), self.clock.since_boot(), text))

    def records(self) -> Sequence[KernelRecord]:
        if self.unavailable is not None:
            raise self.unavailable
        return list(self.written)


class FakePrograms:
    """Runs nothing: ``answers`` maps a program's name, or its path, to what it does."""

    def __init__(self, answers: Mapping[str, Finished | UnavailableError] | None = None) -> None:
        self.answers = dict(answers or {})
        self.asked: list[Sequence[str]] = []

    def run(
        self, argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
    ) -> Finished:
        self.asked.append(argv)
        answer = self.answers.get(argv[0])
        if answer is None:
            raise UnavailableError("cannot be started: No such file or directory", argv[0])
        if isinstance(answer, UnavailableError):
            raise answer
        return answer


@dataclass(frozen=True)
class FakeTree(Tree):
    """A :class:`~nvrx_slurm.health.tree.Tree` in a directory of the test's, that can be written."""

    def write(self, path: str, text: str | bytes) -> None:
        """Make a file, and the directories above it."""
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).write_bytes(text if isinstance(text, bytes) else text.encode())

    def add_port(
        self,
        device: str,
        number: int = 1,
        *,
        state: str = "4: ACTIVE",
        phys_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        counters: Iterable[str] = ("link_downed", "symbol_error", "port_rcv_errors"),
    ) -> str:
        """Make a network port; return its directory."""
        port = f"/sys/class/infiniband/{device}/ports/{number}"
        for file, text in (("state", state), ("phys_state", phys_state), ("rate", rate)):
            self.write(f"{port}/{file}", text + "\n")
        for counter in counters:
            self.write(f"{port}/counters/{counter}", "0\n")
        return port

    def add_pci_device(self, bridge: str, address: str) -> str:
        """Make a PCI device below a bridge, with the link from /sys/bus; return its directory."""
        device = f"/sys/devices/{bridge}/{address}"
        self.at(device).mkdir(parents=True)
        link = self.at(f"/sys/bus/pci/devices/{address}")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.at(device))
        return device


def fake_node(
    root: Path, nvml: Nvml | Exception | None = None, stage: Stage = Stage.MANUAL, **fields: object
) -> Node:
    """Return a healthy node below ``root``, with a state directory and no network ports.

    Args:
        root: a directory of the test's own.
        nvml: its GPUs; an exception: NVML can't be opened; None: there is no driver.
        stage: of the run.
        fields: of :class:`~nvrx_slurm.health.node.Node`, to be different.
    """
    tree = FakeTree(root / "root")
    tree.write("/proc/sys/kernel/random/boot_id", BOOT_ID + "\n")
    tree.write("/proc/meminfo", "MemTotal: 1056784512 kB\nMemFree: 9 kB\nMemAvailable: 1000000000 kB\n")
    clock = FakeClock()

    def open_nvml() -> Nvml:
        if nvml is None:
            raise UnavailableError("there is no NVIDIA driver library", "libnvidia-ml.so.1")
        if isinstance(nvml, Exception):
            raise nvml
        return nvml

    node = Node(
        stage=stage,
        host="n1",
        tree=tree,
        clock=clock,
        programs=FakePrograms(),
        kernel_log=FakeKernelLog(clock),
        controller=FakeControllerClock(clock),
        open_nvml=open_nvml,
        state=StateDir(root / "state"),
    )
    return dataclasses.replace(node, **fields)  # type: ignore[arg-type]
