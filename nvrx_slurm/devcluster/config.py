"""The files that make four processes on one machine a Slurm cluster: pure text from a description."""

from __future__ import annotations

import dataclasses
import re

from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.state import CONTROLLER, ClusterState, Layout

CONTROLLER_PORT = 6817
NODE_PORT = 6818
CPUS_PER_NODE = 16
MEMORY_PER_NODE_MB = 65536

# Times that depend on each other, smallest first: scheduling every second < KillWait (SIGTERM to SIGKILL) <
# MessageTimeout < SlurmdTimeout (a silent node is DOWN; slurmctld pings at a third of it) < MinJobAge (how
# long a finished job can still be asked about).
_SLURM_CONF = """\
# Written by nvrx-devcluster up; changes are lost at the next one.
ClusterName={name}
SlurmctldHost={controller}({controller_address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge_socket}

StateSaveLocation={controller_dir}/state
SlurmctldPidFile={controller_dir}/slurmctld.pid
SlurmctldLogFile={controller_dir}/slurmctld.log
SlurmdSpoolDir={nodes_dir}/%n/spool
SlurmdPidFile={nodes_dir}/%n/slurmd.pid
SlurmdLogFile={nodes_dir}/%n/slurmd.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
LogTimeFormat=iso8601_ms

# A node claims more CPUs and memory than the machine has.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true

JobRequeue=1
ReturnToService=2
SlurmdTimeout=20
KillWait=5
MessageTimeout=10
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
{gres_types}
{nodes}
PartitionName=batch Nodes={node_list} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
{more}"""


@dataclasses.dataclass(frozen=True, order=True)
class SlurmVersion:
    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> SlurmVersion:
        """Read what ``slurmd -V`` prints, such as ``slurm-wlm 22.05.8``.

        Raises:
            DevClusterError: there is no version in it.
        """
        found = re.search(r"\b(\d+)\.(\d+)(?:\.\d+)?", text)
        if found is None:
            raise DevClusterError(f"slurmd -V answered {text.strip()!r}, which names no Slurm version")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02d}"


def slurm_conf(state: ClusterState, layout: Layout, subnet: Subnet) -> str:
    gpus = f" Gres=gpu:{state.gpus_per_node}" if state.gpus_per_node else ""
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={subnet.address(node)} CPUs={CPUS_PER_NODE} Sockets=1 "
        f"CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1 RealMemory={MEMORY_PER_NODE_MB}{gpus} State=UNKNOWN"
        for node in state.node_names
    )
    return _SLURM_CONF.format(
        name=state.name,
        controller=CONTROLLER,
        controller_address=subnet.address(CONTROLLER),
        controller_port=CONTROLLER_PORT,
        node_port=NODE_PORT,
        munge_socket=layout.munge_socket,
        controller_dir=layout.controller,
        nodes_dir=layout.root / "nodes",
        gres_types="GresTypes=gpu" if state.gpus_per_node else "",
        nodes=nodes,
        node_list=",".join(state.node_names),
        # Of a name that comes twice Slurm takes the later one.
        more="".join(f"{line}\n" for line in state.slurm_conf),
    )


def gres_conf(state: ClusterState, layout: Layout) -> str:
    """GPUs need files: Slurm reports a mere count as none."""
    if not state.gpus_per_node:
        return ""
    files = ",".join(str(layout.gpus / f"nvidia{gpu}") for gpu in range(state.gpus_per_node))
    return "".join(f"NodeName={node} Name=gpu File={files}\n" for node in state.node_names)


def cgroup_conf(version: SlurmVersion) -> str:
    """The one place that depends on the Slurm version.

    The nodes track processes without control groups, but slurmd looks for a hierarchy all the same, and may
    want systemd to make one. Since 23.11 that can be turned off. Before, naming the plugin for version 1
    keeps it from looking: this plugin touches the hierarchy only on behalf of plugins that are not used here.
    """
    return "CgroupPlugin=disabled\n" if version >= SlurmVersion(23, 11) else "CgroupPlugin=cgroup/v1\n"


def hosts(state: ClusterState, subnet: Subnet, machine: str) -> str:
    """The private /etc/hosts of every node: the nodes, the controller, and the machine they run on.

    Args:
        machine: the real host name; an srun outside of the nodes gives it to slurmctld as its own.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    members = (CONTROLLER, *state.node_names)
    lines += [f"{subnet.address(member)} {member}" for member in members]
    if machine not in (*members, "localhost", ""):
        lines.append(f"{subnet.host} {machine}")
    return "\n".join(lines) + "\n"
