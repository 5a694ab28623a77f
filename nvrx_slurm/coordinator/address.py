"""Which of this host's addresses the job's nodes can reach."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable


class NoAddressError(RuntimeError):
    """No address of this host leads to any node."""


def address_toward(nodes: Iterable[str], node_address: Callable[[str], str]) -> str:
    """Return the local address that the kernel would use toward the first node that resolves.

    ``node_address`` gives Slurm's own address of a node, for sites where its name does not resolve here.

    Raises:
        NoAddressError: none resolves or is routed.
    """
    last = "there are no nodes"
    for node in nodes:
        for name in (lambda node=node: node, lambda node=node: node_address(node)):
            try:
                target = socket.getaddrinfo(name(), 9, type=socket.SOCK_DGRAM)[0]
                with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
                    # Connecting a datagram socket sends nothing; it only looks up the route.
                    probe.connect(target[4])
                    return str(probe.getsockname()[0])
            except (OSError, RuntimeError) as error:
                last = f"{node}: {error}"
    raise NoAddressError(f"no address of this host leads to the job's nodes ({last})")
