"""Who comes late to collectives, told by how long the kernels of NCCL wait.

The kernels of one collective end together on all ranks. Who comes last waits for nobody, so the slow rank has
the *shortest* ones: their duration as such says nothing of a rank, the difference does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

COLLECTIVE_KERNEL = "ncclDev"


def lateness(waits: Mapping[int, float]) -> dict[int, float]:
    """Return how much later than the first one each rank comes to a collective, in the unit of ``waits``.

    Args:
        waits: the mean time of a NCCL kernel by rank, of ranks that take part in the same collectives. NaN: a
            rank has none, and NaN is returned for it.
    """
    longest = max((wait for wait in waits.values() if not math.isnan(wait)), default=math.nan)
    return {rank: longest - wait for rank, wait in waits.items()}
