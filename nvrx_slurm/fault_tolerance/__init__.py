"""What a training script imports: its side of hang detection, progress and checkpoint reports."""

from nvrx_slurm.fault_tolerance.client import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadControlRequest,
)
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.wire.rank_channel import WorkloadAction

__all__ = [
    "FaultToleranceConfig",
    "RankMonitorClient",
    "RankMonitorClientError",
    "WorkloadAction",
    "WorkloadControlRequest",
]
