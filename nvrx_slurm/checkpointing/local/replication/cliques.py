"""Which ranks keep copies of each other's parts: cliques, of which each member holds the parts of all."""

from __future__ import annotations

from collections.abc import Sequence


def check_cliques(replication_jump: int, replication_factor: int, world_size: int) -> None:
    """Check that cliques of this shape divide the job.

    Raises:
        ValueError: a number is not positive, or the ranks don't divide evenly.
    """
    values = {
        "replication_jump": replication_jump,
        "replication_factor": replication_factor,
        "world_size": world_size,
    }
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value}: a number from 1 is accepted")
    span = replication_jump * replication_factor
    if world_size % span:
        raise ValueError(
            f"world_size={world_size} is no multiple of replication_jump={replication_jump} * "
            f"replication_factor={replication_factor} = {span}: give a replication_jump that fits (1: "
            "each rank may fail alone), or the cliques with GroupWrapper.from_list_of_groups"
        )


def clique_of(rank: int, replication_jump: int, replication_factor: int) -> list[int]:
    """Return the clique of ``rank``: ``replication_factor`` ranks, ``replication_jump`` apart."""
    block, within = divmod(rank, replication_jump * replication_factor)
    first = block * replication_jump * replication_factor + within % replication_jump
    return [first + k * replication_jump for k in range(replication_factor)]


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[list[int]]:
    """Return all cliques, in the order of their first members.

    Args:
        replication_jump: ranks that fail together, mostly those of a node: no clique has two of them.
        replication_factor: nodes that hold a copy; all of a clique's but one may be lost.
        world_size: ranks of the job.

    Raises:
        ValueError: a number is not positive, or the ranks don't divide evenly.

    Example::

        parse_group_sequence(2, 2, 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    check_cliques(replication_jump, replication_factor, world_size)
    cliques = (clique_of(rank, replication_jump, replication_factor) for rank in range(world_size))
    return [list(clique) for clique in sorted({tuple(clique) for clique in cliques})]


def own_clique(cliques: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return the clique that ``rank`` is in.

    Raises:
        ValueError: it is in none or in several, or twice in one.
    """
    own = [clique for clique in cliques for member in clique if member == rank]
    if len(own) != 1:
        raise ValueError(f"rank {rank} is in {len(own)} cliques of {list(map(list, cliques))}: one is needed")
    return list(own[0])
