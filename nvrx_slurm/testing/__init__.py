"""Public fakes behind the same protocols as the real parts."""

from nvrx_slurm.testing.fabric import FakeFabric
from nvrx_slurm.testing.gpus import FakeGpu
from nvrx_slurm.testing.slurm import FakeSlurmClient, running_job

__all__ = ["FakeFabric", "FakeGpu", "FakeSlurmClient", "running_job"]
