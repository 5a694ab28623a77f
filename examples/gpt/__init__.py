"""The parts of `train_gpt.py` that are not about surviving faults, and the checkpoints, which are."""
