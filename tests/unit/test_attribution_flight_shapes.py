"""Dumps as other versions of torch write them, and as other jobs leave them: the same rank is found."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from fr_world import Group, World, entry, tensor_and_data_parallel

from nvrx_slurm.attribution.flight_recorder import (
    CulpritClass,
    DumpError,
    Dumps,
    FlightReport,
    analyze,
)
from nvrx_slurm.attribution.flight_recorder.load import parse_dump
from nvrx_slurm.attribution.flight_recorder.trace import reduce_dump

RANKS = 16
CULPRIT = 6
Dump = dict[str, Any]


def each_entry(change: Callable[[Dump], object]) -> Callable[[Dump], object]:
    def all_of(dump: Dump) -> None:
        for one in dump["entries"]:
            change(one)

    return all_of


def without(*keys: str) -> Callable[[Dump], object]:
    return lambda dump: [dump.pop(key, None) for key in keys]


def keeps_last(count: int) -> Callable[[Dump], object]:
    return lambda dump: dump.update(entries=dump["entries"][-count:])


def started(one: Dump) -> None:
    if one["state"] == "scheduled":
        one.update(state="started", time_discovered_started_ns=one["time_created_ns"])


def same_ranks_twice(dump: Dump) -> None:
    """Every group has a twin of the same ranks, as of FSDP over a tensor-parallel mesh of one."""
    for name, config in list(dump["pg_config"].items()):
        twin = str(1000 + int(name))
        dump["pg_config"][twin] = {**config, "name": twin, "desc": "TWIN"}


def coalesced(dump: Dump) -> None:
    """An operation of several takes one sequence number, and op_id goes on."""
    many = []
    for one in dump["entries"]:
        many += [{**one, "op_id": 3 * one["op_id"] + part} for part in range(3)]
    dump["entries"] = many


SHAPES: dict[str, Callable[[Dump], object]] = {
    "version 2.0, of which much is missing": lambda dump: (
        dump.update(version="2.0"),
        without("comm_lib_version", "pg_status")(dump),
        each_entry(without("retired", "timeout_ms", "op_id", "is_p2p", "p2p_seq_id"))(dump),
    ),
    "version 2.4 with nccl_version": lambda dump: dump.update(
        version="2.4", nccl_version=dump.pop("comm_lib_version")
    ),
    "a later minor version with keys that nobody knows": lambda dump: (
        dump.update(
            version="2.99", later={"a": [1, {"b": None}]}, health_check_results={"gpu": {"status": 0}}
        ),
        each_entry(lambda one: one.update(later=1, priority=None))(dump),
    ),
    "no counters": without("pg_status"),
    "no groups, only what the entries name": without("pg_config", "pg_status"),
    "no sizes and no types": each_entry(
        without("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
    ),
    "times that are no numbers": each_entry(
        lambda one: one.update(
            time_created_ns=math.nan, duration_ms=math.nan, time_discovered_started_ns=None
        )
    ),
    "stacks and durations": each_entry(
        lambda one: one.update(frames=[{"name": "f", "filename": "t.py", "line": 3}] * 40, duration_ms=0.25)
    ),
    "empty stacks": each_entry(lambda one: one.update(frames=[])),
    "timing is on: what waits has started": each_entry(started),
    "a small ring": keeps_last(12),
    "the ring alone, without what it has forgotten": lambda dump: (
        keeps_last(12)(dump),
        without("pg_status")(dump),
    ),
    "groups of the same ranks": same_ranks_twice,
    "coalesced operations": coalesced,
    "lists for tuples": each_entry(lambda one: one.update(process_group=list(one["process_group"]))),
    "numbers in strings": lambda dump: dump.update(
        pg_status={k: {n: str(v) for n, v in s.items()} for k, s in dump["pg_status"].items()}
    ),
}


def report_of(dumps: dict[int, Dump], **options: Any) -> FlightReport:
    return analyze(Dumps({rank: reduce_dump(rank, dump) for rank, dump in dumps.items()}), **options)


def named(report: FlightReport) -> dict[int, CulpritClass]:
    return {culprit.rank: culprit.kind for culprit in report.culprits}


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_rank_is_named_whatever_wrote_the_dump(shape: str, form: str, side: str) -> None:
    programs = tensor_and_data_parallel(RANKS, 4, 10)
    stops = {CULPRIT: 17}
    world = World(programs, stops if side == "host" else None, stops if side == "device" else None)
    dumps = {}
    for rank in programs:
        dump = world.dump(rank, "2.9")
        SHAPES[shape](dump)
        data = pickle.dumps(dump, protocol=2) if form == "pickle" else json.dumps(dump).encode()
        dumps[rank] = parse_dump(data)
    kind = CulpritClass.HOST_LAG if side == "host" else CulpritClass.DEVICE_LAG
    assert named(report_of(dumps)) == {CULPRIT: kind}


def test_a_mixed_directory_is_of_both_versions_and_both_forms() -> None:
    programs = tensor_and_data_parallel(RANKS, 4, 10)
    world = World(programs, {CULPRIT: 17})
    dumps = {}
    for rank in programs:
        dump = world.dump(rank, f"2.{rank % 11}")
        if rank % 3:
            SHAPES["version 2.0, of which much is missing"](dump)
        dumps[rank] = parse_dump(json.dumps(dump).encode()) if rank % 2 else dump
    assert named(report_of(dumps)) == {CULPRIT: CulpritClass.HOST_LAG}


def pipeline(idle: int, *, missing: int | None = None) -> FlightReport:
    """Four stages pass activations on; ``idle`` has stopped sending, those behind it wait to receive."""
    stages = Group("3", "PIPELINE", (1, 5, 9, 13))
    dumps = {}
    for place, rank in enumerate(stages.ranks):
        entries = [
            entry(stages, 0, 0, name=f"nccl:recv {place}<-{place - 1}", is_p2p=True, p2p_seq_id=n, done=True)
            for n in range(1, 4)
            if place
        ]
        if place > stages.ranks.index(idle):
            entries.append(
                entry(stages, 0, 0, name=f"nccl:recv {place}<-{place - 1}", is_p2p=True, p2p_seq_id=4)
            )
        dumps[rank] = {
            "version": "2.10",
            "pg_config": {"3": {"name": "3", "desc": "PIPELINE", "ranks": str(list(stages.ranks))}},
            "pg_status": {},
            "entries": entries,
        }
    return report_of({r: d for r, d in dumps.items() if r != missing}, world_size=14)


@pytest.mark.parametrize("idle", [1, 5, 9])
def test_of_a_pipeline_the_stage_that_has_stopped_sending_is_named(idle: int) -> None:
    assert named(pipeline(idle)) == {idle: CulpritClass.HOST_LAG}


def test_without_its_dump_it_is_suspected() -> None:
    assert named(pipeline(5, missing=5)) == {5: CulpritClass.NO_DUMP}


@pytest.mark.parametrize(
    "change",
    [
        lambda dump: dump.update(entries=None),
        lambda dump: dump.pop("entries"),
        lambda dump: dump.update(entries=[], pg_status=None, pg_config=None),
        lambda dump: dump.update(pg_status={"0": {}}),
    ],
)
def test_a_rank_that_recorded_nothing_hides_nobody(change: Callable[[Dump], object]) -> None:
    programs = tensor_and_data_parallel(RANKS, 4, 10)
    world = World(programs, {CULPRIT: 17})
    dumps = {rank: world.dump(rank) for rank in programs}
    change(dumps[15])
    assert CULPRIT in named(report_of(dumps))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.update(collective_seq_id="many"),
        lambda one: one.update(process_group=7),
        lambda one: one.update(process_group=[]),
        lambda one: one.update(pg_id=None),
        lambda one: one.update(state=None),
        lambda one: one.update(profiling_name=None),
        lambda one: one.update(input_sizes="x"),
        lambda one: one.update(collective_seq_id=2**70),
    ],
)
def test_one_dump_that_makes_no_sense_costs_no_other(change: Callable[[Dump], object]) -> None:
    programs = tensor_and_data_parallel(RANKS, 4, 10)
    world = World(programs, {CULPRIT: 17})
    traces = {rank: reduce_dump(rank, world.dump(rank)) for rank in programs if rank != 15}
    odd = world.dump(15)
    each_entry(change)(odd)
    with contextlib.suppress(DumpError):
        traces[15] = reduce_dump(15, parse_dump(pickle.dumps(odd, protocol=2)))
    found = named(analyze(Dumps(traces), world_size=RANKS))
    assert CULPRIT in found
    assert set(found) <= {CULPRIT, 15}
