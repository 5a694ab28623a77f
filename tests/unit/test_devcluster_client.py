"""What slurmctld says about nodes, as Slurm 22.05 and 24.11 print it."""

from __future__ import annotations

import pytest

from nvrx_slurm.devcluster.client import NodeInfo, parse_nodes

IDLE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=16  CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=0.52 Gres=gpu:2 "
    "NodeAddr=10.77.0.11 NodeHostName=n1 Version=22.05.8 OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC @0  "
    "RealMemory=65536 AllocMem=0 FreeMem=23247 Sockets=1 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 "
    "Partitions=batch  BootTime=1796043313 SlurmdStartTime=1796044621 LastBusyTime=1796044621  "
)
DOWN = (
    "NodeName=n2 CoresPerSocket=16 State=DOWN*+DRAIN ThreadsPerCore=1 BootTime=None SlurmdStartTime=None "
    "CapWatts=n/a  Reason=two words = one reason [root@1796044621] "
)


def test_a_healthy_node_is_read() -> None:
    assert parse_nodes(IDLE) == {"n1": NodeInfo("n1", "idle", 1796044621, "")}


def test_a_lost_node_is_read_with_its_reason() -> None:
    node = parse_nodes(IDLE + "\n" + DOWN)["n2"]

    assert node == NodeInfo("n2", "down*+drain", 0, "two words = one reason")
    assert node.base == "down"
    assert not node.responds


def test_a_reason_may_be_followed_by_other_fields() -> None:
    line = "NodeName=n3 State=DOWN Reason=power lost [root@1796044621] Comment=spare"
    assert parse_nodes(line)["n3"].reason == "power lost"


@pytest.mark.parametrize(
    ("state", "base", "responds"),
    [
        ("idle", "idle", True),
        ("idle*", "idle", False),
        ("idle+not_responding", "idle", False),
        ("mixed+drain", "mixed", True),
        ("down*", "down", False),
        ("unknown*", "unknown", False),
    ],
)
def test_states_tell_whether_the_node_answers(state: str, base: str, responds: bool) -> None:
    node = NodeInfo("n1", state, 0, "")
    assert (node.base, node.responds) == (base, responds)


def test_no_answer_is_no_nodes() -> None:
    assert parse_nodes("") == {}
