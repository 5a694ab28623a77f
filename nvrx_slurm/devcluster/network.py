"""One bridge per cluster, one virtual cable per machine on it.

Each machine has its own network namespace with ``eth0`` in it; the other end of the cable hangs on the
bridge under a name that says whose it is. Taking that end down is pulling the cable.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.state import CONTROLLER

# 10.77.0.0 to 10.77.63.0, then as many of the range that is reserved for benchmarks (RFC 2544): it is free
# even where a site routes all of 10.0.0.0/8.
POOL: tuple[ipaddress.IPv4Network, ...] = tuple(
    ipaddress.IPv4Network(f"{prefix}.{third}.0/24") for prefix in ("10.77", "198.18") for third in range(64)
)
_FIRST_NODE = 10


@dataclasses.dataclass(frozen=True)
class Subnet:
    """The addresses and interface names of the cluster in slot ``index``."""

    index: int

    @property
    def network(self) -> ipaddress.IPv4Network:
        return POOL[self.index]

    @property
    def host(self) -> str:
        """The machine's own address on the bridge."""
        return str(self.network[1])

    @property
    def bridge(self) -> str:
        return f"nvrx{self.index}br"

    def _number(self, member: str) -> int:
        return 2 if member == CONTROLLER else _FIRST_NODE + int(member.removeprefix("n"))

    def address(self, member: str) -> str:
        return str(self.network[self._number(member)])

    def port(self, member: str) -> str:
        """The bridge's end of the member's cable."""
        return f"nvrx{self.index}{member}"

    def hardware_address(self, member: str) -> str:
        """Fixed, so that the neighbours' tables stay true when a node boots again."""
        return f"02:4e:56:{self.index:02x}:00:{self._number(member):02x}"

    def owns(self, interface: str) -> bool:
        prefix = f"nvrx{self.index}"
        rest = interface.removeprefix(prefix)
        return interface.startswith(prefix) and (
            rest in ("br", CONTROLLER) or (rest[:1] == "n" and rest[1:].isdigit())
        )


def pick_slot(
    used: Iterable[int], interfaces: Iterable[str], routed: Sequence[ipaddress.IPv4Network]
) -> Subnet:
    """The first slot that no cluster uses, whose interface names are free and whose subnet is not routed.

    Raises:
        DevClusterError: there is none.
    """
    taken = set(used)
    names = tuple(interfaces)
    for index, network in enumerate(POOL):
        subnet = Subnet(index)
        if index in taken or any(subnet.owns(name) for name in names):
            continue
        if not any(network.overlaps(route) for route in routed):
            return subnet
    raise DevClusterError(
        f"every subnet for dev clusters ({POOL[0]} to {POOL[63]}, {POOL[64]} to {POOL[-1]}) is in use or "
        f"already routed on this machine: take a cluster down, or free one of them (see ip route)"
    )


def routed_networks(routes: str) -> tuple[ipaddress.IPv4Network, ...]:
    """The destinations in the output of ``ip -j -4 route show table all``, without the default route."""
    destinations = (str(route.get("dst", "default")) for route in json.loads(routes or "[]"))
    return tuple(
        ipaddress.IPv4Network(destination, strict=False)
        for destination in destinations
        if destination not in ("default", "0.0.0.0/0")
    )


def interfaces() -> tuple[str, ...]:
    return tuple(name for _, name in socket.if_nameindex())


def routes() -> tuple[ipaddress.IPv4Network, ...]:
    return routed_networks(_ip(["-j", "-4", "route", "show", "table", "all"]))


def create_bridge(subnet: Subnet) -> None:
    """
    Raises:
        DevClusterError: the kernel or the container does not allow it.
    """
    # A fixed hardware address: a bridge otherwise takes the lowest of its ports', and changes with them.
    host_mac = f"02:4e:56:{subnet.index:02x}:00:01"
    try:
        batch(
            [
                f"link add {subnet.bridge} address {host_mac} type bridge stp_state 0 mcast_snooping 0",
                f"link set {subnet.bridge} addrgenmode none",
                f"addr add {subnet.host}/{subnet.network.prefixlen} dev {subnet.bridge}",
                f"link set {subnet.bridge} up",
            ]
        )
    except DevClusterError as error:
        raise DevClusterError(
            f"cannot create a network bridge ({error}): nvrx-devcluster needs a kernel with bridge and veth "
            f"devices and, inside a container, a privileged one"
        ) from error


def plug_in(subnet: Subnet, members: dict[str, int]) -> None:
    """Lay a cable from the bridge into the network namespace of each member's process; its end is down."""
    lines = []
    for member, pid in members.items():
        port = subnet.port(member)
        lines += [
            f"link add {port} type veth peer name eth0 address {subnet.hardware_address(member)} netns {pid}",
            f"link set {port} addrgenmode none master {subnet.bridge}",
            f"link set {port} up",
        ]
    batch(lines)


def member_commands(subnet: Subnet, member: str) -> list[str]:
    """What the machine itself does to its interfaces."""
    return [
        "link set lo up",
        f"addr add {subnet.address(member)}/{subnet.network.prefixlen} dev eth0",
        "link set eth0 up",
    ]


def is_plugged_in(subnet: Subnet, member: str) -> bool:
    """Whether the cable exists and carries."""
    try:
        flags = int(Path("/sys/class/net", subnet.port(member), "flags").read_text(), 16)
    except OSError:
        return False
    return bool(flags & 1)  # IFF_UP


def cut(subnet: Subnet, member: str) -> None:
    """Pull the cable: packets get lost, both sides hear nothing more."""
    if subnet.port(member) in interfaces():
        batch([f"link set {subnet.port(member)} down"])


def heal(subnet: Subnet, member: str) -> None:
    batch([f"link set {subnet.port(member)} up"])


def remove(names: Iterable[str]) -> None:
    """Delete those of the interfaces that exist.

    They vanish on their own too while this runs (with the namespace at a cable's other end).

    Raises:
        DevClusterError: one is still there afterwards.
    """
    for name in names:
        if name in interfaces():
            try:
                _ip(["link", "delete", name])
            except DevClusterError:
                if name in interfaces():
                    raise


def batch(lines: Sequence[str]) -> None:
    """
    Raises:
        DevClusterError: ip refused a line.
    """
    _ip(["-batch", "-"], stdin="\n".join(lines) + "\n")


def _ip(arguments: list[str], stdin: str = "") -> str:
    done = subprocess.run(
        ["ip", *arguments], input=stdin, capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode != 0:
        said = "; ".join(done.stderr.split("\n")[:2]).strip("; ") or f"exit code {done.returncode}"
        raise DevClusterError(f"ip says: {said}")
    return done.stdout
