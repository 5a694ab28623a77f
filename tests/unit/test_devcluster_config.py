"""slurm.conf and its companions as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nvrx_slurm.devcluster import DevCluster, config
from nvrx_slurm.devcluster.config import SlurmVersion
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.state import ClusterState, Layout, Phase

LAYOUT = Layout(Path("/state/dev"))
SUBNET = Subnet(1)


def cluster(nodes: int = 2, gpus_per_node: int = 2) -> ClusterState:
    return ClusterState("dev", 1, nodes, gpus_per_node, (), Phase.STARTING, "boot")


def settings(text: str) -> dict[str, str]:
    """The lines of one setting each."""
    lines = (line.partition("=") for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value for key, _, value in lines if " " not in key}


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("slurm-wlm 22.05.8\n", SlurmVersion(22, 5)),
        ("slurm-wlm 24.11.5", SlurmVersion(24, 11)),
        ("slurm 25.11.8", SlurmVersion(25, 11)),
        ("slurm 23.11.0-0rc1", SlurmVersion(23, 11)),
    ],
)
def test_slurmd_tells_its_version(said: str, version: SlurmVersion) -> None:
    assert SlurmVersion.parse(said) == version


def test_an_answer_without_a_version_is_refused() -> None:
    with pytest.raises(DevClusterError, match="names no Slurm version"):
        SlurmVersion.parse("slurmd: command failed")


@pytest.mark.parametrize(
    ("version", "plugin"),
    [
        (SlurmVersion(22, 5), "cgroup/v1"),
        (SlurmVersion(23, 2), "cgroup/v1"),
        (SlurmVersion(23, 11), "disabled"),
        (SlurmVersion(24, 11), "disabled"),
    ],
)
def test_control_groups_are_never_looked_for(version: SlurmVersion, plugin: str) -> None:
    assert settings(config.cgroup_conf(version)) == {"CgroupPlugin": plugin}


def test_every_node_has_its_address_cpus_memory_and_gpus() -> None:
    text = config.slurm_conf(cluster(), LAYOUT, SUBNET)

    nodes = [line for line in text.splitlines() if line.startswith("NodeName=")]
    assert [line.split()[:2] for line in nodes] == [
        ["NodeName=n1", "NodeAddr=10.77.1.11"],
        ["NodeName=n2", "NodeAddr=10.77.1.12"],
    ]
    assert all("CPUs=16" in line and "RealMemory=65536" in line and "Gres=gpu:2" in line for line in nodes)
    assert "PartitionName=batch Nodes=n1,n2 Default=YES" in text


def test_the_daemons_are_found_by_address_and_share_no_path() -> None:
    found = settings(config.slurm_conf(cluster(), LAYOUT, SUBNET))

    assert found["SlurmctldHost"] == "ctl(10.77.1.2)"
    assert found["AuthInfo"] == "socket=/state/dev/munge/munge.socket"
    assert found["SlurmdSpoolDir"] == "/state/dev/nodes/%n/spool"
    assert found["StateSaveLocation"] == "/state/dev/ctl/state"


def test_times_that_depend_on_each_other_are_in_order() -> None:
    found = settings(config.slurm_conf(cluster(), LAYOUT, SUBNET))

    times = [int(found[name]) for name in ("KillWait", "MessageTimeout", "SlurmdTimeout", "MinJobAge")]
    assert times == sorted(times)
    assert found["ReturnToService"] == "2"
    assert found["JobRequeue"] == "1"


def test_gpus_are_files() -> None:
    assert config.gres_conf(cluster(), LAYOUT).splitlines() == [
        "NodeName=n1 Name=gpu File=/state/dev/gpus/nvidia0,/state/dev/gpus/nvidia1",
        "NodeName=n2 Name=gpu File=/state/dev/gpus/nvidia0,/state/dev/gpus/nvidia1",
    ]


def test_a_cluster_without_gpus_does_not_mention_them() -> None:
    state = cluster(gpus_per_node=0)

    assert config.gres_conf(state, LAYOUT) == ""
    assert "gpu" not in config.slurm_conf(state, LAYOUT, SUBNET).lower()


def test_hosts_names_every_node_the_controller_and_the_machine() -> None:
    lines = config.hosts(cluster(), SUBNET, "workstation").splitlines()

    assert lines[0] == "127.0.0.1 localhost"
    assert lines[2:] == ["10.77.1.2 ctl", "10.77.1.11 n1", "10.77.1.12 n2", "10.77.1.1 workstation"]


@pytest.mark.parametrize("machine", ["n1", "ctl", "localhost", ""])
def test_a_machine_whose_name_is_taken_inside_does_not_shadow_a_node(machine: str) -> None:
    assert not any(
        line.startswith("10.77.1.1 ") for line in config.hosts(cluster(), SUBNET, machine).splitlines()
    )


def test_lines_of_the_callers_own_come_last_and_so_count() -> None:
    more = ("KillWait=77", "Prolog=/etc/nvrx/prolog.d/*")
    text = config.slurm_conf(dataclasses.replace(cluster(), slurm_conf=more), LAYOUT, SUBNET)
    assert text.splitlines()[-2:] == list(more)
    assert settings(text)["KillWait"] == "77"


@pytest.mark.parametrize("line", ["Prolog", "a b=c", "X=1\nY=2", "=1", "Include /etc/passwd"])
def test_what_is_no_line_of_slurm_conf_is_refused(line: str) -> None:
    with pytest.raises(DevClusterError, match=r"no line of slurm\.conf: use NAME=VALUE"):
        DevCluster("dev").up(slurm_conf=[line])
