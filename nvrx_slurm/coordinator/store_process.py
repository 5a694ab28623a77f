"""Hosts the ranks' rendezvous store, in a process of its own so that the Coordinator needs no torch.

``python -m nvrx_slurm.coordinator.store_process ADDRESS`` binds a free port of ADDRESS, prints it, and serves
until its standard input ends. The store outlives every rank; ranks of different cycles use different
prefixes of it (``TORCHELASTIC_USE_AGENT_STORE`` in torch/distributed/rendezvous.py).
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from nvrx_slurm import linux


def main(address: str) -> None:
    """Serve until the parent closes our standard input, or dies."""
    linux.die_with_parent(signal.SIGKILL, os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=65535)
    port = listener.getsockname()[1]
    # TCPStore owns the descriptor from here on, and it alone closes it.
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    print(port, flush=True)
    sys.stdin.buffer.read()
    del store


if __name__ == "__main__":
    main(sys.argv[1])
