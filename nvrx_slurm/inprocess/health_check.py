"""Whether this rank can go on: its CUDA context, GPU, adapters, and how often it has failed."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar, cast

from nvrx_slurm.health.gpus import driver_branch
from nvrx_slurm.health.nics import Port
from nvrx_slurm.health.nvlinks import active_links
from nvrx_slurm.health.nvml import NOT_THERE, Nvml, NvmlError, RecoveryAction
from nvrx_slurm.health.tree import Tree
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.inprocess.bounded import call_with_timeout
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.exception import HealthCheckError, RestartError
from nvrx_slurm.inprocess.finalize import cuda_device
from nvrx_slurm.inprocess.own_gpu import near_ports, own_index, this_node
from nvrx_slurm.inprocess.param_utils import check_count, check_duration
from nvrx_slurm.inprocess.state import FrozenState

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_NVML_TIMEOUT = timedelta(seconds=10)
_FIRST_BRANCH = 570
"""Of drivers that tell what a GPU needs."""


class FaultCounterExceeded(RestartError):
    """This rank's function has failed too often."""


class HealthCheck(ABC):
    """Is called in the main thread after a fault, and at the start of every iteration.

    An exception ends this rank after a fault; at the start of an iteration it restarts everybody.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return ``state``."""


class CudaHealthCheck(HealthCheck):
    """The CUDA context still answers: all work of the device ends, and none of it in an error.

    Does nothing while CUDA is not in use.

    Args:
        timeout: for the work that is still in the device's queues.

    Raises:
        TimeoutError: when called: it took longer.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        check_duration("timeout", timeout)
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        device = cuda_device()
        if device is not None:
            import torch

            call_with_timeout(
                lambda: torch.cuda.synchronize(device), self.timeout, f"synchronizing CUDA device {device}"
            )
        return state


class FaultCounter(HealthCheck):
    """Ends a rank whose own function has raised too often.

    Args:
        max_rank_faults: how many faults it may have; None: no limit.

    Raises:
        FaultCounterExceeded: when called: this was one more.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        check_count("max_rank_faults", max_rank_faults, 0)
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        if state.fn_exception is not None:
            self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"the function has failed {self.faults_count} times on this rank, and max_rank_faults is "
                f"{self.max_rank_faults}"
            )
        return state


class ChainedGPUHealthCheck(HealthCheck):
    """The driver asks for nothing to be done to this rank's GPU; drivers before r570 do not tell.

    Args:
        device_index: as NVML counts; None: by LOCAL_RANK and CUDA_VISIBLE_DEVICES.

    Raises:
        HealthCheckError: when called: it asks for a reset, a reboot or the like, or can't read the GPU.
    """

    def __init__(self, device_index: int | None = None) -> None:
        check_count("device_index", device_index, 0)
        self.device_index = device_index

    def __call__(self, state: FrozenState) -> FrozenState:
        _ask_own_gpu(self.device_index, _check_recovery_action)
        return state


class ChainedNVLHealthCheck(HealthCheck):
    """Says in the log how many NVLinks of this rank's GPU are up. It ends no rank.

    Args:
        device_index: as NVML counts; None: by LOCAL_RANK and CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, device_index: int | None = None) -> None:
        check_count("device_index", device_index, 0)
        self.device_index = device_index
        self._most = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        try:
            up = _ask_own_gpu(self.device_index, lambda nvml, gpu: len(active_links(nvml, gpu)[0]))
        except RestartError as error:
            _log.warning("NVLinks can't be looked at: %s", error)
            return state
        if up is not None and up < self._most:
            _log.warning("%d NVLinks of this rank's GPU are up, and %d were", up, self._most)
        self._most = max(self._most, up or 0)
        return state


class ChainedNicHealthCheck(HealthCheck):
    """No adapter next to this rank's GPU has lost its link since this object was made.

    Args:
        device_index: of the GPU as NVML counts; None: by LOCAL_RANK and CUDA_VISIBLE_DEVICES.
        tree: where sysfs is.

    Raises:
        HealthCheckError: when called: a port's ``link_downed`` has grown.
    """

    def __init__(self, device_index: int | None = None, *, tree: Tree = Tree()) -> None:  # noqa: B008 - immutable
        check_count("device_index", device_index, 0)
        self._tree = tree
        self._before: dict[Port, int] = {}
        try:
            near = _ask_own_gpu(device_index, lambda nvml, gpu: near_ports(nvml, gpu, tree)) or []
        except (RestartError, UnavailableError) as error:
            _log.info("network adapters are not looked at at a restart: %s", error)
            near = []
        for port in near:
            count = self._link_downed(port)
            if count is not None:
                self._before[port] = count

    def __call__(self, state: FrozenState) -> FrozenState:
        for port, before in self._before.items():
            count = self._link_downed(port)
            if count is not None and count > before:
                raise HealthCheckError(
                    f"{port.name} has lost its link: link_downed was {before} and is {count}"
                )
        return state

    def _link_downed(self, port: Port) -> int | None:
        return port.counters(self._tree)[0].get("link_downed")


def automatic_checks(environ: Mapping[str, str] = os.environ) -> list[HealthCheck]:
    """Return what is looked at without being asked for: nothing without LOCAL_RANK, or without NVML."""
    if not environ.get("LOCAL_RANK", "").isdigit() or this_node() is None:
        return []
    return [ChainedGPUHealthCheck(), ChainedNVLHealthCheck(), ChainedNicHealthCheck()]


def with_automatic(user_check: HealthCheck | None, automatic: list[HealthCheck]) -> HealthCheck | None:
    """Return one check that looks at adapters, NVLinks and GPU first, then at what the user gave."""
    own = user_check.instances if isinstance(user_check, Compose) else (user_check,)
    parts = [part for part in own if part is not None] + automatic
    return cast(HealthCheck, Compose(*parts)) if parts else None


def _ask_own_gpu(index: int | None, ask: Callable[[Nvml, int], _T]) -> _T | None:
    """Return what NVML says of this rank's GPU; None without NVML, or where it does not know the question.

    Raises:
        HealthCheckError: NVML answers with an error.
        TimeoutError: it does not answer.
    """
    nvml = this_node()
    if nvml is None:
        return None

    def look() -> _T | None:
        gpu = own_index(nvml) if index is None else index
        return None if gpu is None else ask(nvml, gpu)

    try:
        return call_with_timeout(look, _NVML_TIMEOUT, "asking NVML")
    except NvmlError as error:
        if error.code in NOT_THERE:
            return None
        raise HealthCheckError(f"this rank's GPU can't be read: {error}") from error


def _check_recovery_action(nvml: Nvml, gpu: int) -> None:
    branch = driver_branch(nvml.driver_version())
    if branch is None or branch < _FIRST_BRANCH:
        return
    action = nvml.recovery_action(gpu)
    if action != RecoveryAction.NONE:
        known = action in list(RecoveryAction)
        asked = RecoveryAction(action).name.replace("_", " ").lower() if known else f"action {action}"
        raise HealthCheckError(f"the driver asks for {asked} of GPU {gpu}")
