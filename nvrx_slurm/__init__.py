"""Slurm-native resiliency for PyTorch training.

A crash, a hang or a lost node heals in the same allocation and costs seconds instead of the job.
See ``docs/`` for the user's, the administrator's and the maintainer's guide.
"""

__version__ = "0.1.0"
