"""What a machine has to offer before a cluster can be started on it."""

from __future__ import annotations

import os
import shutil
import subprocess

from nvrx_slurm.devcluster.config import SlurmVersion
from nvrx_slurm.devcluster.errors import DevClusterError

PACKAGES = "slurm-wlm slurm-wlm-basic-plugins munge iproute2"
SYSTEM_DIRECTORIES = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


def search_path() -> str:
    """PATH, and the system's directories even where the user has not got them in it."""
    return os.pathsep.join(filter(None, (os.environ.get("PATH"), SYSTEM_DIRECTORIES)))


def require_root(doing: str) -> None:
    """
    Raises:
        DevClusterError: this process is not root.
    """
    if os.geteuid() != 0:
        raise DevClusterError(f"{doing} needs root (namespaces, network devices): run it with sudo")


def find_programs(*names: str) -> dict[str, str]:
    """The full path of each program.

    Raises:
        DevClusterError: one is missing.
    """
    found = {name: shutil.which(name, path=search_path()) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise DevClusterError(
            f"{', '.join(missing)} not found on this machine: install Slurm and its helpers with "
            f"apt-get install {PACKAGES}"
        )
    return {name: path for name, path in found.items() if path is not None}


def slurm_version(slurmd: str) -> SlurmVersion:
    """
    Raises:
        DevClusterError: slurmd does not tell its version.
    """
    try:
        done = subprocess.run([slurmd, "-V"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DevClusterError(f"{slurmd} -V does not run ({error}): reinstall the package slurmd") from error
    return SlurmVersion.parse(done.stdout or done.stderr)
