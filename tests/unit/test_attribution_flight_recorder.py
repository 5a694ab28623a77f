"""Flight Recorder: the rank that everybody waits for is found, from whatever dumps there are."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from fr_world import Group, World, entry, tensor_and_data_parallel, to_json
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import shared_data

from nvrx_slurm.attribution.flight_recorder import (
    CulpritClass,
    DumpError,
    Dumps,
    FlightReport,
    Manifest,
    Place,
    analyze,
    analyze_directory,
    find_dumps,
    read_dumps,
)
from nvrx_slurm.attribution.flight_recorder.load import parse_dump
from nvrx_slurm.attribution.flight_recorder.read import rank_of
from nvrx_slurm.attribution.flight_recorder.trace import reduce_dump

REAL = shared_data("fr_traces")
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real 16-rank traces are not at {REAL}")
EVERYBODY = Group("0", "default_pg", (0, 1, 2, 3))


def report_of(dumps: dict[int, dict[str, Any]], **options: Any) -> FlightReport:
    return analyze(Dumps({rank: reduce_dump(rank, dump) for rank, dump in dumps.items()}), **options)


def named(report: FlightReport) -> dict[int, CulpritClass]:
    return {culprit.rank: culprit.kind for culprit in report.culprits}


@needs_real
@pytest.mark.parametrize(
    ("trace", "kind"), [("gpu_error_2nd", CulpritClass.DEVICE_LAG), ("lock_gil_1st", CulpritClass.HOST_LAG)]
)
class TestRealTraces:
    def test_both_culprits_are_named_and_nobody_else(self, trace: str, kind: CulpritClass) -> None:
        report = analyze_directory(REAL / trace)
        assert named(report) == {9: kind, 14: kind}
        assert (report.world_size, report.present, report.missing) == (16, 16, ())

    def test_no_culprit_is_missed_when_any_one_dump_is_missing(self, trace: str, kind: CulpritClass) -> None:
        read = read_dumps(find_dumps(REAL / trace))
        for gone in range(16):
            kept = {rank: found for rank, found in read.traces.items() if rank != gone}
            found = named(analyze(Dumps(kept), world_size=16))
            assert {9, 14} <= set(found), gone
            assert {found[rank] for rank in set(found) - {9, 14}} <= {CulpritClass.NO_DUMP}

    def test_without_both_culprits_dumps_they_are_suspected(self, trace: str, kind: CulpritClass) -> None:
        read = read_dumps(find_dumps(REAL / trace))
        kept = {rank: found for rank, found in read.traces.items() if rank not in (9, 14)}
        report = analyze(Dumps(kept), world_size=16)
        assert named(report) == dict.fromkeys((9, 14), CulpritClass.NO_DUMP)
        assert not report.conclusive


class TestCulprits:
    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 15), st.integers(4, 30), st.sampled_from(["host", "device"]), st.booleans())
    def test_the_rank_that_stopped_is_named_and_nobody_else(
        self, rank: int, at: int, side: str, as_json: bool
    ) -> None:
        programs = tensor_and_data_parallel(16, 4, 10)
        stops = {rank: at}
        world = World(programs, stops if side == "host" else None, stops if side == "device" else None)
        dumps = {
            r: parse_dump(to_json(world.dump(r))) if as_json else world.dump(r, f"2.{9 + r % 2}")
            for r in programs
        }
        report = report_of(dumps)
        kind = CulpritClass.HOST_LAG if side == "host" else CulpritClass.DEVICE_LAG
        assert named(report) == {rank: kind}
        assert rank not in report.victims

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 15), st.integers(0, 15))
    def test_a_missing_dump_hides_no_culprit_and_its_rank_is_a_suspicion_at_most(
        self, rank: int, gone: int
    ) -> None:
        programs = tensor_and_data_parallel(16, 4, 10)
        world = World(programs, {rank: 17})
        report = report_of({r: world.dump(r) for r in programs if r != gone}, world_size=16)
        found = named(report)
        assert rank in found
        assert set(found) <= {rank, gone}
        if rank == gone:
            assert not report.conclusive

    def test_a_rank_without_a_dump_whose_process_is_gone_is_more_than_a_suspicion(self) -> None:
        programs = tensor_and_data_parallel(16, 4, 10)
        world = World(programs, {5: 17})
        dumps = {r: world.dump(r) for r in programs if r != 5}
        report = report_of(dumps, world_size=16, gone=[5], places={5: Place("n1", 1)})
        (culprit,) = report.culprits
        assert (culprit.rank, culprit.node, culprit.gpu, culprit.confidence) == (5, "n1", 1, 0.7)
        assert report.conclusive

    def test_a_job_that_trains_on_has_no_culprit(self) -> None:
        programs = tensor_and_data_parallel(8, 4, 3)
        world = World(programs)
        report = report_of({r: world.dump(r) for r in programs})
        assert (named(report), report.victims, report.fabric) == ({}, (), "")

    def test_all_ranks_in_one_operation_point_at_the_fabric(self) -> None:
        dumps = {
            r: dump_of([entry(EVERYBODY, 0, 1, done=True), entry(EVERYBODY, 0, 2, at=1)]) for r in range(4)
        }
        report = report_of(dumps)
        assert named(report) == {}
        assert "all 4 ranks wait in operation 2" in report.fabric

    def test_local_group_ids_of_different_ranks_are_not_mixed_up(self) -> None:
        """Id 1 is the group of ranks 0 and 1 here, and that of ranks 2 and 3 there."""
        left, right = Group("1", "TENSOR", (0, 1)), Group("2", "TENSOR", (2, 3))
        dumps = {
            rank: dump_of(
                [entry(left if rank < 2 else right, 1, 7 if rank < 2 else 900, done=True)],
                (left if rank < 2 else right,),
            )
            for rank in range(4)
        }
        assert named(report_of(dumps)) == {}

    def test_gloo_names_no_members_and_leaves_the_state_at_scheduled(self) -> None:
        """As torch 2.13's gloo dumps look when rank 2 sleeps after step 3."""
        dumps = {}
        for rank in range(4):
            last = 4 if rank == 2 else 5
            dump = dump_of(
                [
                    entry(
                        Group("", "", ()),
                        0,
                        number,
                        name="gloo:all_reduce",
                        state="scheduled",
                        retired=number < 5,
                    )
                    for number in range(1, last + 1)
                ]
            )
            dump["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
            counters = {"last_enqueued_collective": last, "last_started_collective": -1}
            dump["pg_status"] = {"0": {**counters, "last_completed_collective": min(last, 4)}}
            dumps[rank] = dump
        assert named(report_of(dumps, world_size=4)) == {2: CulpritClass.HOST_LAG}

    def test_an_entry_that_lags_behind_the_ranks_own_counter_accuses_nobody(self) -> None:
        """A dump can fall between the two: gloo retires an entry a moment after it has counted it."""
        dumps = {}
        for rank in range(4):
            dump = dump_of([entry(EVERYBODY, 0, 4, done=rank != 3)])
            counters = {"last_enqueued_collective": 4, "last_started_collective": -1}
            dump["pg_status"] = {"0": {**counters, "last_completed_collective": 4}}
            dumps[rank] = dump
        assert named(report_of(dumps)) == {}

    def test_a_receive_leads_to_the_sender_that_has_no_dump(self) -> None:
        stages = Group("3", "PIPELINE", (1, 5, 9))
        waiting = entry(stages, 0, 0, name="nccl:recv 1<-0", is_p2p=True, p2p_seq_id=4, collective_seq_id=0)
        report = report_of({5: dump_of([waiting], (stages,)), 9: dump_of([], (stages,))}, world_size=10)
        assert named(report) == {1: CulpritClass.NO_DUMP}


class TestCrowds:
    """Ranks that lag because of something that they share: a file server, a switch, the fabric."""

    def report(self, hosts: int, *, gpus_per_node: int = 0) -> FlightReport:
        programs = tensor_and_data_parallel(16, 4, 10)
        world = World(programs, {4 * rank % 16 + rank // 4: 9 for rank in range(hosts)})
        dumps = {rank: world.dump(rank) for rank in programs}
        places = {rank: Place(f"n{rank // gpus_per_node}") for rank in programs} if gpus_per_node else None
        return report_of(dumps, places=places)

    def test_few_that_lag_are_culprits(self) -> None:
        report = self.report(2)
        assert (len(report.culprits), report.conclusive, report.fabric) == (2, True, "")

    def test_more_than_a_quarter_are_no_list_of_culprits(self) -> None:
        report = self.report(9)
        assert len(report.culprits) > 4
        assert not report.conclusive
        assert {culprit.confidence for culprit in report.culprits} == {0.3}
        assert "ranks lag, more than 25%" in report.fabric

    def test_unless_they_are_those_of_few_nodes(self) -> None:
        programs = tensor_and_data_parallel(16, 4, 10)
        world = World(programs, dict.fromkeys(range(8, 16), 9))
        places = {rank: Place(f"n{rank // 8}") for rank in programs}
        report = report_of({rank: world.dump(rank) for rank in programs}, places=places)
        assert {culprit.rank for culprit in report.culprits} == set(range(8, 16))
        assert report.conclusive
        assert not self.report(9, gpus_per_node=4).conclusive


class TestDesync:
    def test_the_minority_that_calls_something_else_is_named(self) -> None:
        dumps = {
            r: dump_of([entry(EVERYBODY, 0, 9, name="nccl:all_gather" if r == 3 else "nccl:all_reduce")])
            for r in range(4)
        }
        report = report_of(dumps)
        assert named(report) == {3: CulpritClass.MISMATCH}
        assert "all_gather" in report.mismatches[0].what

    def test_a_different_size_is_a_mismatch_and_a_root_alone_may_pass_another_to_a_broadcast(self) -> None:
        def of(name: str) -> FlightReport:
            return report_of(
                {r: dump_of([entry(EVERYBODY, 0, 9, name=name, size=32 if r == 1 else 16)]) for r in range(4)}
            )

        assert named(of("nccl:all_reduce")) == {1: CulpritClass.MISMATCH}
        assert named(of("nccl:broadcast")) == {}

    def test_ranks_that_wait_for_each_other_are_a_circle(self) -> None:
        a, b = Group("1", "A", (0, 1)), Group("2", "B", (0, 1))
        dumps = {
            0: dump_of([entry(a, 0, 1), entry(b, 1, 1, at=1)], (a, b)),
            1: dump_of([entry(b, 1, 1), entry(a, 0, 1, at=1)], (a, b)),
        }
        assert named(report_of(dumps)) == {0: CulpritClass.DESYNC, 1: CulpritClass.DESYNC}


class TestSkewedDumps:
    def lagging(self, seconds: float, behind: int) -> FlightReport:
        traces = {}
        for rank in range(4):
            ops = [entry(EVERYBODY, 0, n, done=rank != 2, at=n) for n in range(1, behind + 1)]
            traces[rank] = reduce_dump(rank, dump_of(ops))
            traces[rank].written_at = 100.0 + (0 if rank == 2 else seconds)
        return analyze(Dumps(traces))

    def test_a_lag_of_one_operation_is_nothing_when_the_dump_is_older(self) -> None:
        assert named(self.lagging(30.0, 1)) == {}

    def test_it_is_something_when_the_dumps_are_of_one_moment_or_the_lag_is_long(self) -> None:
        assert named(self.lagging(0.1, 1)) == {2: CulpritClass.DEVICE_LAG}
        assert named(self.lagging(30.0, 5)) == {2: CulpritClass.DEVICE_LAG}


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


class TestLoading:
    @pytest.mark.parametrize(
        ("data", "says"),
        [
            (b"", "empty"),
            (b"\x00\x01", "neither"),
            (pickle.dumps(_Evil(), protocol=2), "asks for"),
            (pickle.dumps({"version": "2.10", "entries": []}, protocol=2)[:-4], "cut off|damaged"),
            (pickle.dumps(["2.10"], protocol=2), "list"),
            (pickle.dumps({"version": "3.0"}, protocol=2), "version 3.0"),
            (b'{"version": "2.10", "entries": [', "cut off"),
            (b'{"version": "2.10", "x": ' + b"[" * 200_000, "deep|cut off"),
            (b'{"version": "2.10", "entries": 7}', "entries"),
        ],
    )
    def test_what_is_no_dump_is_refused_with_the_reason(
        self, data: bytes, says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(DumpError, match=says):
            parse_dump(data)
        assert "executed" not in capsys.readouterr().out

    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=200))
    def test_random_bytes_never_do_more_than_be_refused(self, noise: bytes) -> None:
        whole = pickle.dumps(dump_of([entry(EVERYBODY, 0, 1)]), protocol=2)
        for data in (noise, b"\x80\x02" + noise, b"{" + noise, whole[: len(noise)] + noise):
            with contextlib.suppress(DumpError):
                reduce_dump(0, parse_dump(data))

    def test_a_bad_dump_is_a_caveat_and_the_others_are_used(self, tmp_path: Path) -> None:
        World(tensor_and_data_parallel(8, 4, 5), {3: 9}).write(tmp_path)
        (tmp_path / "_dump_6").write_bytes((tmp_path / "_dump_6").read_bytes()[:100])
        (tmp_path / "notes.txt").write_text("Rank 3")
        (tmp_path / "_dump_7").unlink()
        (tmp_path / "_dump_7").symlink_to(tmp_path / "_dump_1")
        report = analyze_directory(tmp_path, world_size=8)
        assert named(report)[3] is CulpritClass.HOST_LAG
        assert report.missing == (6, 7)
        assert any("_dump_6" in caveat for caveat in report.caveats)

    def test_a_dump_that_asks_for_all_memory_gets_none(self, tmp_path: Path) -> None:
        """A memo index of two billion makes the unpickler want 32 GiB at once."""
        World(tensor_and_data_parallel(8, 4, 5), {3: 9}).write(tmp_path)
        (tmp_path / "_dump_6").write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
        report = analyze_directory(tmp_path, world_size=8)
        assert report.missing == (6,)
        assert any("_dump_6" in caveat and "MemoryError" in caveat for caveat in report.caveats)

    def test_a_rank_beyond_all_reason_takes_no_memory(self) -> None:
        far = Group("0", "default_pg", (0, 1, 99_999_999_999))
        report = report_of({r: dump_of([entry(far, 0, 1)], (far,)) for r in range(2)})
        assert report.world_size == 2

    def test_many_dumps_are_read_by_a_pool_with_the_same_result(self, tmp_path: Path) -> None:
        World(tensor_and_data_parallel(40, 4, 4), {33: 9}).write(tmp_path, "nccl_trace_rank_{}", as_json=True)
        assert named(analyze_directory(tmp_path, workers=2)) == {33: CulpritClass.HOST_LAG}

    def test_the_manifest_tells_rank_node_and_time(self, tmp_path: Path) -> None:
        World(tensor_and_data_parallel(8, 4, 5), {3: 9}).write(tmp_path, "node-17_{}")
        text = json.dumps({"rank": 3, "node": "n9", "job": "1", "cycle": 0, "time": 5.0, "later": 1})
        (tmp_path / "node-17_3.manifest.json").write_text(text)
        (culprit,) = analyze_directory(tmp_path).culprits
        assert (culprit.rank, culprit.node) == (3, "n9")
        assert Manifest(rank=3).cycle == -1

    @pytest.mark.parametrize(
        ("name", "rank"),
        [
            ("_dump_12", 12),
            ("nccl_trace_rank_7", 7),
            ("node-3_10", 10),
            ("trace_rank4_1699999999", 4),
            ("rank_5.json", 5),
            ("fault_injection.log", None),
        ],
    )
    def test_the_rank_is_read_from_the_file_name(self, name: str, rank: int | None) -> None:
        assert rank_of(name) == rank


def dump_of(entries: list[dict[str, Any]], groups: tuple[Group, ...] = (EVERYBODY,)) -> dict[str, Any]:
    config = {g.name: {"name": g.name, "desc": g.description, "ranks": str(list(g.ranks))} for g in groups}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


def test_the_document_holds_what_the_schema_names() -> None:
    programs = tensor_and_data_parallel(8, 4, 5)
    world = World(programs, None, {3: 9})
    found = report_of({r: world.dump(r) for r in programs}, places={3: Place("n1", 3)}).document()
    assert (found["schema"], found["world_size"], found["dumps"]) == (
        "fr.v1",
        8,
        {"present": 8, "missing": []},
    )
    (culprit,) = found["culprits"]
    assert (culprit["rank"], culprit["node"], culprit["gpu"], culprit["class"]) == (3, "n1", 3, "device-lag")
    assert culprit["evidence"][0]["op"] == "all_reduce"
    assert json.dumps(found)
