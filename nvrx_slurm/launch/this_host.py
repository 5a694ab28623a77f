"""Which host this is, and what one launcher at a time may have on it: a node's name, the Coordinator's port.

Both are held by abstract sockets (unix(7)), which leave nothing behind however a process ends, and are as
local as ports are: to the network namespace.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import socket
from collections.abc import Iterable

import psutil


def is_this_host(host: str) -> bool:
    """Tell whether ``host``, a name or an address, leads to this machine."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    own = {_plain(address) for address in _own_addresses()}
    return any(ipaddress.ip_address(found).is_loopback or found in own for found in _resolve(host))


def _own_addresses() -> Iterable[str]:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                yield address.address


def _plain(address: str) -> str:
    return address.partition("%")[0]


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return [_plain(str(address[4][0])) for address in found]


def bind_address(host: str) -> str:
    """Return where to listen so that ``host``, this machine's name or address, is reached.

    All interfaces, unless it is a loopback address: a name may lead to 127.0.1.1 here (Debian's /etc/hosts)
    and elsewhere to the machine.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        found = _resolve(host)
        return "::" if found and all(":" in address for address in found) else "0.0.0.0"
    if literal.is_loopback:
        return host
    return "::" if literal.version == 6 else "0.0.0.0"


def _hold(what: str) -> socket.socket | None:
    # 108 bytes at most, and a name that is no secret: others of this user need only not take it by accident.
    name = f"\0nvrx-launch.{hashlib.sha256(what.encode()).hexdigest()}"
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(name)
        return held
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise  # Not a name is taken, but none is to be had: the next would not be either.
        return None


def claim_hosting(port: int) -> socket.socket | None:
    """Be the one launcher of this host that coordinates on ``port``, until the socket is closed.

    0, a free port, is nobody's. None: another launcher does.
    """
    return _hold(f"port.{port}") if port else socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def claim_node_name(name: str, job: str) -> tuple[str, socket.socket]:
    """Return a node name that no other launcher of this job has on this host: ``name``, or ``name-2`` …

    ``job`` tells jobs apart. A launcher that replaces one that is gone gets its name.
    """
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        held = _hold(f"node.{os.geteuid()}.{job}.{candidate}")
        if held is not None:
            return candidate, held
        number += 1
