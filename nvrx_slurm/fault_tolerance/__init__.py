"""What a training script imports: its side of hang detection, progress and checkpoint reports."""

from nvrx_slurm.fault_tolerance.client import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig

__all__ = ["FaultToleranceConfig", "RankMonitorClient", "RankMonitorClientError"]
