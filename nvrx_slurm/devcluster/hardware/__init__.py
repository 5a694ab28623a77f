"""Simulated hardware of one node: its GPUs, NVLinks, network adapters, kernel log and shared storage.

All of it is files in one directory. A node of a dev cluster sees them where a real one has them, see
``machine_init.py``; a test may point :class:`~nvrx_slurm.health.tree.Tree` at the directory instead.
"""

from nvrx_slurm.devcluster.hardware.faults import Fault, parse_fault, target_table
from nvrx_slurm.devcluster.hardware.node_hardware import NodeHardware
from nvrx_slurm.devcluster.hardware.nvml_sim import STATE_VARIABLE, build_library
from nvrx_slurm.devcluster.hardware.shape import Shape

__all__ = [
    "STATE_VARIABLE",
    "Fault",
    "NodeHardware",
    "Shape",
    "build_library",
    "parse_fault",
    "target_table",
]
