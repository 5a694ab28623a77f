"""Public fakes behind the same protocols as the real parts."""

from nvrx_slurm.testing.slurm import FakeSlurmClient, running_job

__all__ = ["FakeSlurmClient", "running_job"]
