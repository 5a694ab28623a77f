"""Ports of InfiniBand, RoCE and EFA adapters, as sysfs shows them
(Documentation/ABI/stable/sysfs-class-infiniband)."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.health.tree import Tree
from nvrx_slurm.health.unavailable import UnavailableError

CLASS = "/sys/class/infiniband"
COUNTERS = ("link_downed", "symbol_error", "port_rcv_errors")
ACTIVE = "ACTIVE"
_STATES = {
    "state": ("NOP", "DOWN", "INIT", "ARMED", ACTIVE, "ACTIVE_DEFER"),
    "phys_state": (
        "<unknown>",
        "Sleep",
        "Polling",
        "Disabled",
        "PortConfigurationTraining",
        "LinkUp",
        "LinkErrorRecovery",
        "Phy Test",
    ),
}
"""What the kernel writes there (drivers/infiniband/core/sysfs.c)."""


@dataclass(frozen=True)
class Port:
    """One port of one adapter."""

    device: str
    number: str

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def scope(self) -> str:
        return f"nic {self.name}"

    @property
    def path(self) -> str:
        return f"{CLASS}/{self.device}/ports/{self.number}"

    def state(self, tree: Tree, file: str = "state") -> str:
        """Return ``ACTIVE`` for ``4: ACTIVE``; ``file`` may also be ``phys_state``.

        Raises:
            UnavailableError: the file can't be read, or holds something else.
        """
        path = f"{self.path}/{file}"
        text = tree.text(path)
        word = text.partition(":")[2].strip()
        if word not in _STATES[file]:
            raise UnavailableError(f"holds no state: {text[:40]!r}", path, expected=True)
        return word

    def rate_gbps(self, tree: Tree) -> float:
        """Return 400.0 for ``400 Gb/sec (4X NDR)``.

        Raises:
            UnavailableError: the file can't be read, or holds something else.
        """
        path = f"{self.path}/rate"
        text = tree.text(path)
        number, _, rest = text.partition(" ")
        plain = number.replace(".", "", 1)
        if not (plain.isascii() and plain.isdigit() and len(plain) < 8 and rest.startswith("Gb/sec")):
            raise UnavailableError(f"holds no rate: {text[:40]!r}", path, expected=True)
        return float(number)

    def counters(self, tree: Tree) -> tuple[dict[str, int], list[UnavailableError]]:
        """Return the error counters that this adapter has, and what is wrong with others."""
        found: dict[str, int] = {}
        trouble: list[UnavailableError] = []
        for name in COUNTERS:
            try:
                found[name] = tree.number(f"{self.path}/counters/{name}")
            except UnavailableError as error:
                if error.expected:
                    trouble.append(error)
        return found, trouble


def ports(tree: Tree) -> list[Port]:
    """Return every port of every adapter.

    Raises:
        UnavailableError: sysfs can't be listed.
    """
    return [
        Port(device, number)
        for device in tree.names(CLASS)
        for number in tree.names(f"{CLASS}/{device}/ports")
        if number.isdigit()
    ]


def is_named(port: Port, names: tuple[str, ...]) -> bool:
    """Tell whether a configured list names the port, by ``mlx5_0`` or ``mlx5_0/1``."""
    return port.name in names or port.device in names
