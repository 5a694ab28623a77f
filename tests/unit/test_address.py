"""Which of this host's addresses the nodes can reach."""

from __future__ import annotations

import pytest

from nvrx_slurm.coordinator.address import NoAddressError, address_toward
from nvrx_slurm.slurm import SlurmUnavailableError
from nvrx_slurm.testing import FakeSlurmClient, running_job


def test_the_address_is_the_one_that_the_kernel_would_use() -> None:
    assert address_toward(["127.0.0.9"], lambda node: node) == "127.0.0.1"


def test_a_name_that_does_not_resolve_here_is_looked_up_in_slurm() -> None:
    slurm = FakeSlurmClient(running_job("1", ["no-such-node.invalid"]))
    slurm.addresses["no-such-node.invalid"] = "127.0.0.9"
    assert address_toward(["no-such-node.invalid"], slurm.node_address) == "127.0.0.1"


def test_a_node_that_nobody_knows_is_passed_over() -> None:
    nodes = ["no-such-node.invalid", "127.0.0.9"]
    assert address_toward(nodes, lambda node: node) == "127.0.0.1"


def test_slurm_that_cannot_be_asked_is_no_reason_to_give_up() -> None:
    slurm = FakeSlurmClient(running_job("1", ["no-such-node.invalid"]))
    slurm.unavailable = SlurmUnavailableError("down")
    assert address_toward(["no-such-node.invalid", "127.0.0.9"], slurm.node_address) == "127.0.0.1"


def test_ipv6_will_do() -> None:
    try:
        assert address_toward(["::1"], lambda node: node) == "::1"
    except NoAddressError:
        pytest.skip("no IPv6 on this machine")


@pytest.mark.parametrize("nodes", [[], ["no-such-node.invalid"]])
def test_without_an_address_the_last_reason_is_told(nodes: list[str]) -> None:
    with pytest.raises(NoAddressError, match=r"there are no nodes|no-such-node") as error:
        address_toward(nodes, lambda node: node)
    assert "no address of this host leads to the job's nodes" in str(error.value)
