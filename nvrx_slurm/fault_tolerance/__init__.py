"""What a training script imports: its side of hang detection, progress and checkpoint reports."""

from nvrx_slurm.fault_tolerance.client import RankMonitorClient, RankMonitorClientError

__all__ = ["RankMonitorClient", "RankMonitorClientError"]
