"""A real Slurm cluster on one machine, each node in its own namespaces."""

from nvrx_slurm.devcluster.cluster import DevCluster
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.state import Phase
from nvrx_slurm.devcluster.status import ClusterStatus, Link, NodeStatus, Power

__all__ = ["ClusterStatus", "DevCluster", "DevClusterError", "Link", "NodeStatus", "Phase", "Power"]
