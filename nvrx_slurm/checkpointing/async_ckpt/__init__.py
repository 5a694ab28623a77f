"""Checkpoints written in the background: the state at the call exactly, whole or absent on disk."""
