"""At most one Coordinator per job on a host.

A second one's srun would wait for ever for the nodes of the first.
"""

from __future__ import annotations

import os
import socket
import struct

_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))


class JobInUseError(RuntimeError):
    """Another nvrx-srun of this user runs in the job."""


def claim_job(job_id: str, submitted: int) -> socket.socket | None:
    """Hold the job until the returned socket is closed or this process ends.

    An abstract socket (unix(7)) leaves nothing behind, however the process ends. Another user who took the
    name can't keep us from starting: None is returned then.

    Raises:
        JobInUseError: a process of this user holds it.
    """
    # The time of submission, for a host that serves more than one cluster.
    name = f"\0nvrx-srun.{os.geteuid()}.{job_id}.{submitted}"
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        lock.listen(16)
        return lock
    except OSError:
        lock.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(name)
        except OSError:
            return None
        pid, uid, _ = _UCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        return None
    raise JobInUseError(
        f"another nvrx-srun runs in job {job_id} (process {pid}): start this one when that one has ended"
    )
