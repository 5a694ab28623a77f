"""The only code that talks to Slurm."""

from nvrx_slurm.slurm.client import (
    Job,
    Node,
    ScontrolClient,
    SlurmClient,
    SlurmConfig,
    SlurmRefusedError,
    SlurmUnavailableError,
    UnknownJobError,
)
from nvrx_slurm.slurm.diagnosis import (
    DiagnosisClient,
    QueuedJob,
    ScontrolDiagnosis,
    SiteConfig,
    SlurmRelease,
    unavailable_nodes,
)
from nvrx_slurm.slurm.environment import (
    JobEnvironment,
    NotInAllocationError,
    ancestor_titles,
    scrubbed_environment,
    surrounding_step,
)
from nvrx_slurm.slurm.hostlist import HostlistError, compress_hostlist, expand_hostlist
from nvrx_slurm.slurm.requeue import CannotRequeueError, RequeuePlan, plan_requeue, requeue
from nvrx_slurm.slurm.step import AgentStep

__all__ = [
    "AgentStep",
    "CannotRequeueError",
    "DiagnosisClient",
    "HostlistError",
    "Job",
    "JobEnvironment",
    "Node",
    "NotInAllocationError",
    "QueuedJob",
    "RequeuePlan",
    "ScontrolClient",
    "ScontrolDiagnosis",
    "SiteConfig",
    "SlurmClient",
    "SlurmConfig",
    "SlurmRefusedError",
    "SlurmRelease",
    "SlurmUnavailableError",
    "UnknownJobError",
    "ancestor_titles",
    "compress_hostlist",
    "expand_hostlist",
    "plan_requeue",
    "requeue",
    "scrubbed_environment",
    "surrounding_step",
    "unavailable_nodes",
]
