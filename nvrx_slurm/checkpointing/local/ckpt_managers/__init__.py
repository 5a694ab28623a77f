"""Saving and loading local checkpoints."""
