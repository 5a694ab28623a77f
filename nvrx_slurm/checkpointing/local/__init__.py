"""Checkpoints on node-local disk or in memory, each rank's part copied to ranks on other nodes."""
