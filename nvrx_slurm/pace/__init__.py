"""How fast each rank of a job is, and who is slow: values in, values out, without torch.

Whoever has the times of all ranks judges by it: rank 0 of a script that exchanges them through
``torch.distributed``, or the Coordinator, which has them from the agents.
"""

from nvrx_slurm.pace.measured import Kernel, KernelTime, Measured
from nvrx_slurm.pace.verdict import GPU_KERNELS, KernelLoss, StragglerVerdict
from nvrx_slurm.pace.watch import Judgement, RankScore, Recent, SlowDown, Watch

__all__ = [
    "GPU_KERNELS",
    "Judgement",
    "Kernel",
    "KernelLoss",
    "KernelTime",
    "Measured",
    "RankScore",
    "Recent",
    "SlowDown",
    "StragglerVerdict",
    "Watch",
]
