"""Hosts the ranks' rendezvous stores, in a process of its own so that the Coordinator needs no torch.

Started with an address; for each line of standard input it opens a new, empty store on a free port of that
address and prints the port; at the end of the input it exits. It outlives every rank, and each cycle has its
own: torch's ranks expect an agent's store to be fresh (torch/distributed/rendezvous.py,
``_create_c10d_store``), and nothing of an old cycle can be found in a new one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque

from nvrx_slurm import linux


def main() -> None:
    """Serve until the parent closes our standard input, or dies."""
    address = sys.argv[2]
    linux.die_with_parent(signal.SIGKILL, os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Standard output is for ports alone, whatever torch and what it imports may print.
    ports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The running cycle's and the next one's.
    stores: deque[TCPStore] = deque(maxlen=2)
    for _ in sys.stdin:
        listener = socket.create_server((address, 0), family=family, backlog=65535)
        port = listener.getsockname()[1]
        # TCPStore owns the descriptor from here on, and it alone closes it.
        fd = listener.detach()
        stores.append(TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd))
        print(port, file=ports, flush=True)
