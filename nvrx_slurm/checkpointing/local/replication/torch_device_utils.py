"""Devices by their kind, which is all that ranks on different nodes have in common."""

from __future__ import annotations

import torch

from nvrx_slurm.checkpointing.local.basic_state_dict import TensorPlaceholder

__all__ = ["TensorPlaceholder", "get_default_device_from_type"]


def get_default_device_from_type(device_type: str) -> torch.device:
    """Return the device of this kind that the process uses.

    Raises:
        ValueError: another kind than ``cpu`` and ``cuda``.
    """
    match device_type:
        case "cpu":
            return torch.device("cpu")
        case "cuda":
            return torch.device("cuda", torch.cuda.current_device())
    raise ValueError(f"device type {device_type!r}: cpu and cuda are accepted")
