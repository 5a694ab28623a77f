"""Which subnet and which interface names a cluster gets."""

from __future__ import annotations

import json
from ipaddress import IPv4Network

import pytest

from nvrx_slurm.devcluster import network
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.network import POOL, Subnet


def test_the_first_cluster_gets_the_first_slot() -> None:
    assert network.pick_slot([], ["lo", "eth0"], []) == Subnet(0)


def test_slots_of_other_clusters_are_left_alone() -> None:
    assert network.pick_slot([0, 2], [], []) == Subnet(1)


@pytest.mark.parametrize("interface", ["nvrx0br", "nvrx0n7", "nvrx0ctl"])
def test_a_slot_whose_interface_names_exist_is_left_alone(interface: str) -> None:
    assert network.pick_slot([], [interface], []) == Subnet(1)


def test_subnets_that_are_routed_elsewhere_are_left_alone() -> None:
    assert network.pick_slot([], [], [IPv4Network("10.77.0.0/23")]) == Subnet(2)


def test_where_all_of_ten_is_routed_the_benchmark_range_is_used() -> None:
    subnet = network.pick_slot([], [], [IPv4Network("10.0.0.0/8")])
    assert str(subnet.network) == "198.18.0.0/24"


def test_no_free_subnet_says_so() -> None:
    with pytest.raises(DevClusterError, match="every subnet for dev clusters"):
        network.pick_slot(range(len(POOL)), [], [])


def test_names_and_addresses_of_a_slot_belong_to_it_alone() -> None:
    one, ten = Subnet(1), Subnet(10)

    assert (one.host, one.address("ctl"), one.address("n1")) == ("10.77.1.1", "10.77.1.2", "10.77.1.11")
    assert (one.bridge, one.port("n1"), ten.port("n64")) == ("nvrx1br", "nvrx1n1", "nvrx10n64")
    assert one.owns("nvrx1n1")
    assert one.owns("nvrx1br")
    assert one.owns("nvrx1ctl")
    for other in ("nvrx10n1", "nvrx10br", "nvrx1", "nvrx1n", "nvrx1x", "eth0", "xnvrx1n1"):
        assert not one.owns(other)


def test_interface_names_are_short_enough_for_the_kernel() -> None:
    assert len(Subnet(len(POOL) - 1).port("n64")) <= 15


def test_no_two_machines_share_a_hardware_address() -> None:
    members = ["ctl", *(f"n{number}" for number in range(1, 65))]
    assert len({Subnet(index).hardware_address(member) for index in (0, 127) for member in members}) == 130


def test_routes_are_read_without_the_default_one() -> None:
    routes = [
        {"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"},
        {"dst": "192.0.2.0/24", "dev": "eth0"},
        {"type": "local", "dst": "127.0.0.1", "dev": "lo"},
    ]
    assert network.routed_networks(json.dumps(routes)) == (
        IPv4Network("192.0.2.0/24"),
        IPv4Network("127.0.0.1/32"),
    )
    assert network.routed_networks("") == ()
