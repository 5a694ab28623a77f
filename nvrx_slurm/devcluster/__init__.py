"""A real Slurm cluster on one machine, each node in its own namespaces."""

from nvrx_slurm.devcluster.cluster import ClusterStatus, DevCluster, Link, NodeStatus, Power
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.state import Phase

__all__ = ["ClusterStatus", "DevCluster", "DevClusterError", "Link", "NodeStatus", "Phase", "Power"]
