"""Which numbers the ranks that are left have, and which of them run the function.

From right to left in a Compose: first what terminates more ranks, then what numbers those that are left, then
what activates them::

    Compose(ActivateAllRanks(), ShiftRanks(), WholeNodes())
"""

from nvrx_slurm.inprocess.rank_assignment.activation import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
)
from nvrx_slurm.inprocess.rank_assignment.context import (
    AssignmentStore,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
)
from nvrx_slurm.inprocess.rank_assignment.groups import FilterCountGroupedByKey, WholeNodes
from nvrx_slurm.inprocess.rank_assignment.numbering import FillGaps, ShiftRanks
from nvrx_slurm.inprocess.rank_assignment.tree import Tree
from nvrx_slurm.inprocess.rank_assignment.tree_plan import Layer, LayerFlag

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "AssignmentStore",
    "FillGaps",
    "FilterCountGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "ShiftRanks",
    "Tree",
    "WholeNodes",
]
