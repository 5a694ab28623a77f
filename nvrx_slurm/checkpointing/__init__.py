"""Checkpoints that are whole or absent: asynchronous ones, and local ones with replicas on other nodes."""
