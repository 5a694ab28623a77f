"""Checks of network ports: state, rate, counters, what vanished, what is near which GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from health_world import run, status, told

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.pci import nearest
from nvrx_slurm.health.take_baseline import take_baseline
from nvrx_slurm.testing.health import FakeNvml, FakeTree, fake_node


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path / "root")


@pytest.fixture
def node(tmp_path: Path, tree: FakeTree) -> Node:
    """Nine adapters; the last has two ports."""
    for number in range(9):
        tree.add_port(f"mlx5_{number}")
    tree.add_port("mlx5_8", 2)
    return fake_node(tmp_path, FakeNvml(8))


def with_baseline(node: Node) -> Node:
    take_baseline(node).save(node.state)
    return dataclasses.replace(node)


def remove(tree: FakeTree, path: str) -> None:
    for file in sorted(tree.at(path).rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    tree.at(path).rmdir()


@pytest.mark.parametrize("name", ["nic-present", "nic-state", "nic-counters"])
def test_healthy_ports_are_ok(name: str, node: Node) -> None:
    assert status(name, with_baseline(node)) == "ok"


@pytest.mark.parametrize("name", ["nic-present", "nic-state", "nic-counters", "nic-affinity"])
def test_a_node_without_adapters_is_skipped(name: str, tmp_path: Path) -> None:
    assert status(name, fake_node(tmp_path, FakeNvml(8))) == "skip"


def test_w15_a_nic_that_vanished_since_the_baseline_fails(node: Node, tree: FakeTree) -> None:
    later = with_baseline(node)
    remove(tree, "/sys/class/infiniband/mlx5_1")
    (result,) = run("nic-present", later)
    assert (result.status.value, result.scope, result.evidence) == ("fail", "nic mlx5_1/1", "has vanished")
    assert result.node_lost


def test_a_configured_nic_that_is_not_there_fails_without_a_baseline(node: Node) -> None:
    assert told("nic-present", node, expected=("mlx5_0", "mlx5_9")) == [
        ("fail", "nic mlx5_9", "is not there")
    ]


def test_w15_a_nic_that_is_down_at_the_start_fails_where_it_is_expected(node: Node, tree: FakeTree) -> None:
    tree.write("/sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN\n")
    tree.write("/sys/class/infiniband/mlx5_2/ports/1/phys_state", "2: Polling\n")
    down = ("nic mlx5_2/1", "DOWN, Polling")
    assert told("nic-state", node, expected=("mlx5_2",)) == [("fail", *down)]
    assert told("nic-state", node) == [("warn", *down)]
    assert status("nic-state", node, unused=("mlx5_2/1",)) == "ok"


def test_a_port_that_went_down_since_the_baseline_fails(node: Node, tree: FakeTree) -> None:
    later = with_baseline(node)
    tree.write("/sys/class/infiniband/mlx5_2/ports/1/state", "2: INIT\n")
    assert told("nic-state", later) == [("fail", "nic mlx5_2/1", "INIT, LinkUp")]


def test_w15_every_port_of_an_adapter_is_looked_at(node: Node, tree: FakeTree) -> None:
    later = with_baseline(node)
    tree.write("/sys/class/infiniband/mlx5_8/ports/2/state", "1: DOWN\n")
    assert told("nic-state", later) == [("fail", "nic mlx5_8/2", "DOWN, LinkUp")]
    tree.write("/sys/class/infiniband/mlx5_8/ports/2/counters/link_downed", "1\n")
    assert told("nic-counters", later) == [("fail", "nic mlx5_8/2", "link_downed +1 since the baseline")]
    remove(tree, "/sys/class/infiniband/mlx5_8/ports/2")
    assert told("nic-present", later) == [("fail", "nic mlx5_8/2", "has vanished")]


def test_a_lower_rate_than_at_the_baseline_or_configured_fails(node: Node, tree: FakeTree) -> None:
    later = with_baseline(node)
    tree.write("/sys/class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n")
    assert told("nic-state", later) == [("fail", "nic mlx5_0/1", "200 of 400 Gb/s")]
    assert status("nic-state", later, rate_gbps=200) == "ok"


def test_many_new_errors_are_a_warning_and_few_are_none(node: Node, tree: FakeTree) -> None:
    later = with_baseline(node)
    counter = "/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error"
    tree.write(counter, "99\n")
    assert status("nic-counters", later) == "ok"
    tree.write(counter, "100\n")
    assert told("nic-counters", later) == [("warn", "nic mlx5_0/1", "symbol_error +100 since the baseline")]


def test_a_counter_that_was_reset_is_compared_with_zero(node: Node, tree: FakeTree) -> None:
    counter = "/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed"
    tree.write(counter, "7\n")
    later = with_baseline(node)
    tree.write(counter, "0\n")
    assert status("nic-counters", later) == "ok"
    tree.write(counter, "2\n")
    assert told("nic-counters", later) == [("fail", "nic mlx5_0/1", "link_downed +2 since the baseline")]


def test_counters_of_an_earlier_boot_are_not_compared(node: Node, tree: FakeTree) -> None:
    later = with_baseline(node)
    tree.write("/proc/sys/kernel/random/boot_id", "another boot")
    tree.write("/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "5\n")
    assert status("nic-counters", later) == "skip"


def test_an_efa_adapter_without_these_counters_is_ok(tmp_path: Path, tree: FakeTree) -> None:
    tree.add_port("rdmap0s6", counters=())
    node = with_baseline(fake_node(tmp_path))
    assert status("nic-counters", node) == "ok"
    assert status("nic-state", node) == "ok"


@pytest.mark.parametrize("garbage", ["", "ACTIVE", "9: SIDEWAYS", "4:", "\xff\xfe\x00"])
def test_a_state_that_makes_no_sense_is_a_warning(node: Node, tree: FakeTree, garbage: str) -> None:
    later = with_baseline(node)
    tree.write("/sys/class/infiniband/mlx5_0/ports/1/state", garbage)
    assert [(s, scope) for s, scope, _ in told("nic-state", later)] == [("warn", "nic mlx5_0/1")]


# --- near which GPU ----------------------------------------------------------------------------------


def pci_tree(tree: FakeTree, nics: int = 2) -> None:
    """Two switches, each with a GPU and an adapter."""
    for number in range(2):
        bridge = f"pci0000:00/0000:00:0{number}.0"
        tree.add_pci_device(bridge, f"0000:{0x1B + number:02x}:00.0")
        if number < nics:
            device = tree.add_pci_device(bridge, f"0000:{0x2B + number:02x}:00.0")
            tree.add_port(f"mlx5_{number}")
            tree.at(f"/sys/class/infiniband/mlx5_{number}/device").symlink_to(tree.at(device))


def test_the_nearest_adapter_of_every_gpu_is_found_in_the_pci_tree(tmp_path: Path, tree: FakeTree) -> None:
    pci_tree(tree)
    node = fake_node(tmp_path, FakeNvml(2))
    assert told("nic-affinity", node) == [("ok", "node", "gpu 0: mlx5_0, gpu 1: mlx5_1")]


def test_a_gpu_whose_near_adapter_is_down_is_a_warning(tmp_path: Path, tree: FakeTree) -> None:
    pci_tree(tree)
    tree.write("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    node = fake_node(tmp_path, FakeNvml(2))
    assert told("nic-affinity", node) == [("warn", "gpu 1", "no adapter near it is up: mlx5_1")]


def test_a_static_map_is_used_where_the_pci_tree_does_not_tell(tmp_path: Path, tree: FakeTree) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_3"):
        tree.add_port(name)
    node = fake_node(tmp_path, FakeNvml(4))
    gb200 = {0: "mlx5_0", 1: "mlx5_1", 2: "mlx5_3", 3: "mlx5_4"}
    assert told("nic-affinity", node, map=gb200) == [("warn", "gpu 3", "no adapter near it is up: mlx5_4")]


def test_devices_on_different_root_complexes_are_not_near() -> None:
    gpus = {0: "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"}
    assert nearest(gpus, {"far": "/sys/devices/pci0001:00/0001:00:01.0"}) == {0: ()}
    two = {"a": "/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0", "b": "/sys/devices/pci0000:00/x"}
    assert nearest(gpus, two) == {0: ("a",)}
    assert nearest(gpus, {}) == {0: ()}
