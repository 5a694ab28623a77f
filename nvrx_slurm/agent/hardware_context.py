"""What a node's hardware says of itself when its ranks report their times: why one may be slow."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nvrx_slurm.agent.gpus import visible_devices
from nvrx_slurm.health.nvml import Nvml, NvmlError, RealNvml, Throttle
from nvrx_slurm.health.unavailable import UnavailableError

_log = logging.getLogger(__name__)


class HardwareContext:
    """Asks kernel and driver in a thread; a driver that does not answer is not asked again.

    Args:
        environ: of the job; which GPUs it has.
        complaints: what the node's health checks say now, a line each.
        open_nvml: opens the driver's library.
        root: of the file system.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        complaints: Callable[[], Sequence[str]],
        open_nvml: Callable[[], Nvml] = RealNvml,
        root: Path = Path("/"),
    ) -> None:
        self._devices = visible_devices(environ)
        self._complaints = complaints
        self._open_nvml = open_nvml
        self._root = root
        self._nvml: Nvml | None = None
        self._without_gpus = self._devices == []
        self._asking: asyncio.Future[dict[int, list[str]]] | None = None

    async def look(self, local_ranks: Sequence[int]) -> dict[int, list[str]]:
        """Return lines about what each of the local ranks runs on; none while the driver is silent."""
        if self._asking is not None and not self._asking.done():
            return {}
        loop = asyncio.get_running_loop()
        self._asking = loop.run_in_executor(None, self.read, tuple(local_ranks))
        found = await asyncio.shield(self._asking)
        complaints = list(self._complaints())
        return {local_rank: [*lines, *complaints] for local_rank, lines in found.items()}

    def read(self, local_ranks: Sequence[int]) -> dict[int, list[str]]:
        """Do it here and now."""
        node = self._node()
        return {local_rank: [*self._gpu(local_rank), *node] for local_rank in local_ranks}

    def _node(self) -> list[str]:
        lines = []
        try:
            load = float((self._root / "proc/loadavg").read_text().split()[0])
            lines.append(f"load {load:g} on {os.cpu_count()} CPUs")
            # "some avg10=1.53 avg60=0.87 avg300=0.41 total=…" (Documentation/accounting/psi.rst)
            some = (self._root / "proc/pressure/cpu").read_text().split()
            waiting = next(word for word in some if word.startswith("avg60="))
            share = float(waiting.partition("=")[2])
            lines.append(f"tasks waited for a CPU in {share:g} % of the last minute")
        except (OSError, ValueError, IndexError, StopIteration):
            pass
        return lines

    def _gpu(self, local_rank: int) -> list[str]:
        if self._without_gpus:
            return []
        try:
            if self._nvml is None:
                self._nvml = self._open_nvml()
            gpu = self._index(self._nvml, local_rank)
            return [] if gpu is None else describe_gpu(self._nvml, gpu)
        except (NvmlError, UnavailableError) as error:
            if self._nvml is None:
                self._without_gpus = True
                _log.info("GPUs are not asked for clocks and temperature: %s", error)
            return []

    def _index(self, nvml: Nvml, local_rank: int) -> int | None:
        """Return the GPU of a local rank, which uses the one of its number."""
        count = nvml.count()
        if self._devices is None:
            return local_rank if local_rank < count else None
        if local_rank >= len(self._devices):
            return None
        device = self._devices[local_rank]
        if device.isdigit():
            return int(device) if int(device) < count else None
        return next((gpu for gpu in range(count) if nvml.uuid(gpu).startswith(device)), None)


def describe_gpu(nvml: Nvml, gpu: int) -> list[str]:
    """Return clocks, throttling, temperature and ECC errors of a GPU, as far as it tells them."""

    def clocks() -> str:
        clock, highest = nvml.sm_clock_mhz(gpu)
        return f"SM clock {clock} of {highest} MHz"

    def throttle() -> str:
        reasons = nvml.throttle_reasons(gpu)
        seen = [(reason.name or "").replace("_", " ").lower() for reason in Throttle if reasons & reason]
        return f"throttled: {', '.join(seen)}" if seen else "not throttled"

    def temperature() -> str:
        return f"{nvml.temperature_c(gpu)} °C"

    def ecc() -> str:
        return f"{nvml.uncorrected_ecc(gpu)} uncorrected ECC errors"

    questions: list[Callable[[], str]] = [lambda: nvml.uuid(gpu), clocks, throttle, temperature, ecc]
    lines = []
    for ask in questions:
        try:
            lines.append(ask())
        except NvmlError:
            continue
    return lines
