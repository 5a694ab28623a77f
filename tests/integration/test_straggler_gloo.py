"""Straggler reports of real ranks over gloo: who is slow is named, and who is gone stops nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

RANKS = 3
PROGRAM = """
import json, logging, sys, time
import torch.distributed as dist
from nvrx_slurm.straggler import Detector, Watch

folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logging.basicConfig(filename=f"{folder}/log{rank}")
said = {}

def meet(name, ranks):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=ranks)

def step(seconds):
    with Detector.detection_section("step"):
        # So long that the part of a second by which a busy machine makes it longer does not matter.
        time.sleep(seconds)
    with Detector.detection_section("wait"):
        dist.barrier()

def report():
    report = Detector.generate_report()
    return None if report is None else {
        "ranks": sorted(report.section_relative_perf_scores.get("step", {})),
        "individual": sorted(report.section_individual_perf_scores["step"]),
        "nodes": {str(key): value for key, value in report.rank_to_node.items()},
        "named": [(v.rank, v.section, v.reports) for v in watch.add(report)],
    }

Detector.initialize(node_name=f"n{rank}", timeout_s=5)
watch = Watch(threshold=0.7)
meet("first", world)
said["reports"] = []
for period in range(3):
    for _ in range(3):
        step(0.6 if rank == 1 else 0.2)
    said["reports"].append(report())

# Rank 2 is gone without a word.
dist.barrier()
if rank < 2:
    with Detector.detection_section("step"):
        pass
    begun = time.monotonic()
    said["alone"] = report()
    said["waited"] = time.monotonic() - begun
    with Detector.detection_section("step"):
        pass
    begun = time.monotonic()
    said["again"] = report()
    said["at_once"] = time.monotonic() - begun
    dist.destroy_process_group()
    # The two of them meet anew, as after a restart in the process.
    meet("second", 2)
    with Detector.detection_section("step"):
        pass
    said["anew"] = report()
    dist.destroy_process_group()
    Detector.shutdown()
json.dump(said, open(f"{folder}/said{rank}", "w"))
import os
os._exit(0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("straggler")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder), str(rank), str(RANKS)],
            env=environ,
            stderr=(folder / f"stderr{rank}").open("wb"),
        )
        for rank in range(RANKS)
    ]
    try:
        codes = [rank.wait(250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * RANKS, [(folder / f"stderr{rank}").read_text() for rank in range(RANKS)]
    return [
        {**json.loads((folder / f"said{rank}").read_text()), "log": (folder / f"log{rank}").read_text()}
        for rank in range(RANKS)
    ]


def test_the_slow_rank_is_named_in_the_second_report_and_no_other(said: list[dict[str, Any]]) -> None:
    first, second, third = said[0]["reports"]
    assert first["ranks"] == list(range(RANKS))
    assert first["nodes"] == {"0": "n0", "1": "n1", "2": "n2"}
    assert first["named"] == []
    assert [1, "step", 2] in second["named"]
    assert [1, "step", 3] in third["named"]
    assert {
        rank for report in (second, third) for rank, section, _ in report["named"] if section == "step"
    } == {1}
    assert said[1]["reports"] == said[2]["reports"] == [None] * 3


def test_a_rank_that_is_gone_costs_one_report_and_bounded_time(said: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert said[rank]["alone"] is None
        assert said[rank]["waited"] < 30
        assert said[rank]["log"].count("did not take part") == 1
        # Then each speaks for itself, without asking anybody.
        assert said[rank]["again"]["individual"] == [rank]
        assert said[rank]["at_once"] < 3


def test_ranks_that_meet_anew_are_compared_again(said: list[dict[str, Any]]) -> None:
    assert said[0]["anew"]["ranks"] == [0, 1]
    assert said[0]["anew"]["nodes"] == {"0": "n0", "1": "n1"}
    assert said[1]["anew"] is None
