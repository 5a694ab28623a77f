"""What a training script imports: ``RankMonitorClient``."""
