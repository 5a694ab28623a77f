"""The rank's side of :mod:`nvrx_slurm.wire.flight_recorder`: have torch answer while the rank hangs."""

from __future__ import annotations

import ctypes
import logging
import sys
from pathlib import Path
from typing import Any

from nvrx_slurm.wire.flight_recorder import short_address, trace_socket_path

_log = logging.getLogger("nvrx_slurm.fault_tolerance")
_servers: list[Any] = []
"""Never destroyed: that would write to the log at every exit, and in a forked child, which lacks the server's
thread, wait for ever.
"""


def serve_traces(page: Path) -> None:
    """Start torch's server, once in a process, if the program has imported ``torch.distributed``.

    It is the one that ``torch.distributed.elastic.control_plane`` starts, and takes one sleeping thread.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None or _servers:
        return
    try:
        # Others can't reach it: the page's directory is its owner's alone.
        with short_address(trace_socket_path(page)) as address:
            server = c10d._WorkerServer(address)
        # So no destructor runs, not even at exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
        _servers.append(server)
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        _log.info("the Flight Recorder of a hang will not be kept: %s", error)
