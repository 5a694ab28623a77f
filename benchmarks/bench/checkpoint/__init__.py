"""What the benchmarks of checkpoints share."""
