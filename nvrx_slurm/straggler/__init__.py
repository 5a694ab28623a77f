"""Which rank is slow, in which section, and how sure that is: for training scripts.

Names and meaning follow ``nvidia_resiliency_ext.straggler``, so that code moves by changing the import.
"""

from nvrx_slurm.pace import StragglerVerdict, Watch
from nvrx_slurm.straggler.callables import CallableId
from nvrx_slurm.straggler.detector import Detector
from nvrx_slurm.straggler.loop import StragglerDetection
from nvrx_slurm.straggler.report import Report, StragglerId
from nvrx_slurm.straggler.statistic import Statistic

__all__ = [
    "CallableId",
    "Detector",
    "Report",
    "Statistic",
    "StragglerDetection",
    "StragglerId",
    "StragglerVerdict",
    "Watch",
]
