"""A job that stalls: ranks launch operations ahead of their device, one stops, the dumps are taken."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AHEAD = 5
"""Operations that a host launches before its device has done them."""


@dataclass(frozen=True)
class Group:
    name: str
    description: str
    ranks: tuple[int, ...]


def tensor_and_data_parallel(world: int, width: int, steps: int) -> dict[int, list[Group]]:
    """Return each rank's program: per step two tensor-parallel calls, a data-parallel and a global one."""
    everybody = Group("0", "default_pg", tuple(range(world)))
    tensor, data = {}, {}
    for first in range(0, world, width):
        ranks = tuple(range(first, first + width))
        tensor.update(dict.fromkeys(ranks, Group(str(1 + first // width), "TENSOR", ranks)))
    for first in range(width):
        ranks = tuple(range(first, world, width))
        data.update(dict.fromkeys(ranks, Group(str(100 + first), "DATA", ranks)))
    return {
        rank: [group for _ in range(steps) for group in (tensor[rank], tensor[rank], data[rank], everybody)]
        for rank in range(world)
    }


class World:
    """Run the programs until nothing moves.

    Args:
        programs: the groups that each rank calls, in order.
        host_stops: rank → index of the operation that its host never launches.
        device_stops: rank → index of the operation that its device never ends, though it did its share.
    """

    def __init__(
        self,
        programs: Mapping[int, Sequence[Group]],
        host_stops: Mapping[int, int] | None = None,
        device_stops: Mapping[int, int] | None = None,
    ) -> None:
        self.programs = programs
        self._host, self._device = host_stops or {}, device_stops or {}
        self._numbers = {rank: self._number(program) for rank, program in programs.items()}
        self._places = {
            rank: {call: at for at, call in enumerate(zip(program, self._numbers[rank], strict=True))}
            for rank, program in programs.items()
        }
        self.done = dict.fromkeys(programs, 0)
        while sum(self._advance(rank) for rank in programs):
            pass

    @staticmethod
    def _number(program: Sequence[Group]) -> list[int]:
        counts: Counter[Group] = Counter()
        numbers = []
        for group in program:
            counts[group] += 1
            numbers.append(counts[group])
        return numbers

    def launched(self, rank: int) -> int:
        return min(self.done[rank] + AHEAD, len(self.programs[rank]), self._host.get(rank, 10**9))

    def _arrived(self, rank: int, group: Group, number: int) -> bool:
        """Whether the rank's device is in the operation or past it."""
        at = self._places[rank][group, number]
        return self.done[rank] > at or (self.done[rank] == at and self.launched(rank) > at)

    def _advance(self, rank: int) -> bool:
        at = self.done[rank]
        if at >= self.launched(rank) or self._device.get(rank) == at:
            return False
        group, number = self.programs[rank][at], self._numbers[rank][at]
        if not all(self._arrived(member, group, number) for member in group.ranks):
            return False
        self.done[rank] += 1
        return True

    def dump(self, rank: int, version: str = "2.10") -> dict[str, Any]:
        """Return the rank's dump as torch's pickle holds it."""
        groups = sorted(set(self.programs[rank]), key=lambda group: int(group.name))
        local = {group: 3 * index for index, group in enumerate(groups)}  # ids have holes, and differ by rank
        launched = list(zip(self.programs[rank], self._numbers[rank], strict=True))[: self.launched(rank)]
        entries = [
            entry(group, local[group], number, done=index < self.done[rank], at=index)
            for index, (group, number) in enumerate(launched)
        ]
        status = {}
        for group in groups:
            enqueued = [number for g, number in launched if g == group]
            completed = [number for g, number in launched[: self.done[rank]] if g == group]
            status[str(local[group])] = {
                "last_enqueued_collective": max(enqueued, default=-1),
                "last_started_collective": -1,
                "last_completed_collective": max(completed, default=-1),
            }
        return {
            "version": version,
            "pg_config": {
                group.name: {"name": group.name, "desc": group.description, "ranks": str(list(group.ranks))}
                for group in groups
            },
            "comm_lib_version": "2.27.3",
            "pg_status": status,
            "entries": entries,
        }

    def write(self, directory: Path, name: str = "_dump_{}", as_json: bool = False) -> None:
        """Write every rank's dump."""
        directory.mkdir(exist_ok=True)
        for rank in self.programs:
            dump = self.dump(rank)
            data = to_json(dump) if as_json else pickle.dumps(dump, protocol=2)
            (directory / name.format(rank)).write_bytes(data)


def entry(
    group: Group,
    local: int,
    number: int,
    *,
    done: bool = False,
    at: int = 0,
    name: str = "nccl:all_reduce",
    size: int = 16,
    **fields: Any,
) -> dict[str, Any]:
    """Return one entry of the ring."""
    return {
        "record_id": at,
        "pg_id": local,
        "process_group": (group.name, group.description),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": 1_000_000_000 + at,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 2_000_000_000 + at if done else None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
        **fields,
    }


def to_json(dump: Mapping[str, Any]) -> bytes:
    """Return the dump as torch's JSON has it: numbers of pg_status are strings, unset times are 0."""
    status = {
        local: {name: str(value) for name, value in counters.items()}
        for local, counters in dump["pg_status"].items()
    }
    entries = [{key: 0 if value is None else value for key, value in e.items()} for e in dump["entries"]]
    return json.dumps({**dump, "pg_status": status, "entries": entries}).encode()
