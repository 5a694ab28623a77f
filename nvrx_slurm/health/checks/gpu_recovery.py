"""What the driver itself asks for."""

from __future__ import annotations

from nvrx_slurm.health.gpus import driver_branch, each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import RecoveryAction
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
_FIRST_BRANCH = 570
_ACTIONS = {
    RecoveryAction.GPU_RESET: (Action.RESET, "reset the GPU"),
    RecoveryAction.NODE_REBOOT: (Action.REBOOT, "reboot the node"),
    RecoveryAction.DRAIN_P2P: (Action.RESET, "end all work with this GPU's peers, then look again"),
    RecoveryAction.DRAIN_AND_RESET: (Action.RESET, "end all work on the GPU, then reset it"),
    RecoveryAction.RECOVER_IMEX_DOMAIN: (Action.REPAIR, "recover the IMEX domain"),
    RecoveryAction.BUS_RESET: (Action.RESET, "reset the GPU's bus"),
    RecoveryAction.SYSTEM_REBOOT: (Action.REBOOT, "reboot the node"),
}


@check("gpu-recovery", stages=EVERY_STAGE, needs=(Need.NVML,))
def gpu_recovery(node: Node, settings: Settings) -> list[CheckResult]:
    """The driver asks for no reset or reboot.

    Reads the GPU's recovery action, the best single signal; drivers before r570 do not have it. Anything but
    none is a fail; a number that nvml.h does not name is a warn.
    """
    version = node.nvml.driver_version()
    branch = driver_branch(version)
    if branch is None or branch < _FIRST_BRANCH:
        return [skip(f"driver {version[:40]} does not tell; r{_FIRST_BRANCH} and later do", _SIGNAL)]

    def look(gpu: int) -> list[CheckResult]:
        value = node.nvml.recovery_action(gpu)
        if value == RecoveryAction.NONE:
            return []
        if value not in list(RecoveryAction):
            return [warn(f"unknown recovery action {value}", _SIGNAL, name(gpu))]
        action, remedy = _ACTIONS[RecoveryAction(value)]
        asked = RecoveryAction(value).name.replace("_", " ").lower()
        return [
            fail(
                f"the driver asks for {asked}",
                f"{_SIGNAL} = {value}",
                name(gpu),
                remedy=remedy,
                action=action,
            )
        ]

    return each_gpu(node, _SIGNAL, look)
