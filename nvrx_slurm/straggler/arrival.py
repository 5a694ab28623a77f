"""Who comes late to collectives, told by how long the kernels of NCCL wait.

The kernels of one collective end together on all ranks. Who comes last waits for nobody, so the slow rank has
the *shortest* ones: their duration as such says nothing of a rank, the difference does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from nvrx_slurm.pace.measured import COLLECTIVE
from nvrx_slurm.straggler.statistic import Statistic, Summary


def mean_wait_us(kernels: Mapping[str, Summary]) -> float:
    """Return the mean time of a NCCL kernel of one rank in one period; NaN without one."""
    waits = [times for name, times in kernels.items() if COLLECTIVE in name]
    count = sum(times[Statistic.NUM] for times in waits)
    total = sum(times[Statistic.NUM] * times[Statistic.AVG] for times in waits)
    return total / count if count else math.nan


def lateness(waits: Mapping[int, float]) -> dict[int, float]:
    """Return how much later than the first one each rank comes to a collective, in the unit of ``waits``.

    Args:
        waits: the mean time of a NCCL kernel by rank, of ranks that take part in the same collectives. NaN: a
            rank has none, and NaN is returned for it.
    """
    longest = max((wait for wait in waits.values() if not math.isnan(wait)), default=math.nan)
    return {rank: longest - wait for rank, wait in waits.items()}
