"""What a training script imports: its side of hang detection, progress and checkpoint reports."""

from nvrx_slurm.fault_tolerance.client import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadControlRequest,
)
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.fault_tolerance.rank_logging import RankFilter, RankFormatter, rank_handler
from nvrx_slurm.fault_tolerance.stopping import outlive_stop_signals, should_stop, stop_on_signals
from nvrx_slurm.wire.rank_channel import WorkloadAction

__all__ = [
    "FaultToleranceConfig",
    "RankFilter",
    "RankFormatter",
    "RankMonitorClient",
    "RankMonitorClientError",
    "WorkloadAction",
    "WorkloadControlRequest",
    "outlive_stop_signals",
    "rank_handler",
    "should_stop",
    "stop_on_signals",
]
