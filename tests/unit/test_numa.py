"""Where ranks are bound, on machines that are a folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nvrx_slurm.agent.gpus import Gpu
from nvrx_slurm.agent.node_gpus import NodeGpus
from nvrx_slurm.agent.numa import NumaError, gpus_per_node, node_of_device, plan_bindings, usable_nodes
from nvrx_slurm.agent.server_protocol import NumaBinding
from nvrx_slurm.testing import FakeGpu
from nvrx_slurm.wire.node_options import NodeOptions

TWO_SOCKETS = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets with four cores each, a node with memory alone, and GPUs on both sockets."""
    for number, cpus in {0: "0-3", 1: "4,5-7", 2: ""}.items():
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for address, node in {"0000:3a:00.0": 1, "0000:3b:00.0": 0, "0000:3c:00.0": -1}.items():
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def nodes(bindings: Sequence[NumaBinding | None]) -> list[int | None]:
    return [None if binding is None else binding.node for binding in bindings]


def test_nodes_have_the_cpus_that_this_process_may_use(sysfs: Path) -> None:
    assert usable_nodes(sysfs, frozenset(range(64))) == TWO_SOCKETS
    assert usable_nodes(sysfs, frozenset({1, 3, 6})) == {0: [1, 3], 1: [6]}
    assert usable_nodes(sysfs, frozenset({1})) == {0: [1]}
    assert usable_nodes(sysfs / "nowhere", frozenset({1})) == {}


def test_a_gpu_is_where_sysfs_says(sysfs: Path) -> None:
    assert [node_of_device(sysfs, f"0000:3{letter}:00.0") for letter in "abcd"] == [1, 0, None, None]


def test_a_rank_goes_to_the_node_of_its_gpu() -> None:
    bindings = plan_bindings(4, TWO_SOCKETS, [1, 0, None, 5], None, strict=True)
    assert nodes(bindings) == [1, 0, None, None]
    assert bindings[0] == NumaBinding(1, [4, 5, 6, 7], True)


def test_without_gpus_ranks_are_spread_in_blocks() -> None:
    assert nodes(plan_bindings(4, TWO_SOCKETS, [], None, strict=False)) == [0, 0, 1, 1]
    assert nodes(plan_bindings(3, TWO_SOCKETS, [], None, strict=False)) == [0, 0, 1]
    assert nodes(plan_bindings(1, TWO_SOCKETS, [], None, strict=False)) == [0]
    assert nodes(plan_bindings(2, {}, [], None, strict=False)) == [None, None]


def test_the_variable_of_the_peer_wins_over_the_machine() -> None:
    assert nodes(plan_bindings(5, TWO_SOCKETS, [1, 1, 1, 1, 1], 2, strict=True)) == [0, 0, 1, 1, None]
    assert gpus_per_node({"NVRX_GPUS_PER_NUMA": " 4 "}) == 4
    assert gpus_per_node({}) is gpus_per_node({"NVRX_GPUS_PER_NUMA": ""}) is None


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_the_variable_is_a_number(text: str) -> None:
    with pytest.raises(NumaError, match=f"NVRX_GPUS_PER_NUMA={text}: a number above 0 is accepted"):
        gpus_per_node({"NVRX_GPUS_PER_NUMA": text})


def bindings_of(
    sysfs: Path, environ: Mapping[str, str], slots: int, gpus: Sequence[Gpu] = (), *, binds: bool
) -> list[int | None]:
    async def run() -> list[int | None]:
        options = NodeOptions(numa_bind=binds)
        found = NodeGpus(environ, options, slots, open_gpus=lambda _: list(gpus), sysfs=sysfs)
        return nodes(await found.bindings())

    return asyncio.run(run())


def test_the_agent_binds_when_it_is_told_to(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    gpus = [FakeGpu("GPU-0", "0000:3a:00.0"), FakeGpu("GPU-1", "0000:3b:00.0")]
    slurm = {"SLURM_JOB_ID": "1"}
    with_gpus = {**slurm, "CUDA_VISIBLE_DEVICES": "0,1"}
    assert bindings_of(sysfs, with_gpus, 2, gpus, binds=True) == [1, 0]
    assert bindings_of(sysfs, slurm, 2, binds=True) == [0, 1]
    assert bindings_of(sysfs, {**slurm, "NVRX_GPUS_PER_NUMA": "1"}, 2, binds=False) == [0, 1]
    assert bindings_of(sysfs, with_gpus, 2, gpus, binds=False) == [None, None]


def test_a_wrong_variable_is_said_where_ranks_are_started(sysfs: Path) -> None:
    with pytest.raises(OSError, match="NVRX_GPUS_PER_NUMA=x"):
        bindings_of(sysfs, {"SLURM_JOB_ID": "1", "NVRX_GPUS_PER_NUMA": "x"}, 1, binds=True)
