"""The only code that talks to Slurm."""

from nvrx_slurm.slurm.client import Job, ScontrolClient, SlurmClient, SlurmUnavailableError, UnknownJobError
from nvrx_slurm.slurm.environment import JobEnvironment, NotInAllocationError, scrubbed_environment
from nvrx_slurm.slurm.hostlist import HostlistError, compress_hostlist, expand_hostlist
from nvrx_slurm.slurm.step import AgentStep

__all__ = [
    "AgentStep",
    "HostlistError",
    "Job",
    "JobEnvironment",
    "NotInAllocationError",
    "ScontrolClient",
    "SlurmClient",
    "SlurmUnavailableError",
    "UnknownJobError",
    "compress_hostlist",
    "expand_hostlist",
    "scrubbed_environment",
]
