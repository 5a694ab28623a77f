"""Reading a fault: ``PATH``, ``PATH=VALUE`` or ``PATH+=NUMBER``, as ``nvrx-devcluster inject`` takes it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.hardware.node_hardware import NodeHardware
from nvrx_slurm.devcluster.hardware.nvml_sim import CALLS
from nvrx_slurm.devcluster.hardware.shape import Shape
from nvrx_slurm.devcluster.hardware.storage import Storage
from nvrx_slurm.devcluster.hardware.targets import TARGETS, Names, Target


@dataclass(frozen=True)
class Fault:
    """One change, understood, and possible on the node's hardware."""

    target: Target
    names: Names
    adds: bool
    value: str

    @property
    def storage(self) -> Storage | None:
        """What the node's storage is to do; None: the fault is one of files."""
        what, _, mode = self.target.path.partition(".")
        return Storage(mode) if what == "storage" else None

    def apply(self, hardware: NodeHardware) -> None:
        """Change the files.

        Raises:
            DevClusterError: they have been damaged.
        """
        before = self.target.get(hardware, self.names) if self.adds else ""
        self.target.put(hardware, self.names, self.target.accepts.stored(self.value, before))


def parse_fault(text: str, shape: Shape) -> Fault:
    """Return the fault that ``text`` names.

    Raises:
        DevClusterError: it names none, or none of this node's hardware; says what is accepted.
    """
    path, equals, value = text.partition("=")
    adds = path.endswith("+") and bool(equals)
    path = path.removesuffix("+") if adds else path
    for target in TARGETS:
        found = target.pattern.fullmatch(path)
        if found is not None:
            names = found.groupdict()
            _require(names, shape, text)
            if not target.accepts.takes(bool(equals), adds, value):
                raise DevClusterError(f"{_quoted(text)} is no fault: accepted is {target.syntax}")
            return Fault(target, names, adds, value)
    paths = [target.path for target in TARGETS]
    near = difflib.get_close_matches(re.sub(r"[0-9]+", "N", path[:60]), paths, 1, 0.7)
    hint = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(target.syntax for target in TARGETS)
    raise DevClusterError(f"{_quoted(text)} is no fault: {hint}accepted are {known}")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _require(names: Names, shape: Shape, text: str) -> None:
    """Refuse what the node has not got."""
    limits = {"N": ("GPU", shape.gpus), "L": ("NVLink", shape.links)}
    for name, value in names.items():
        there = ""
        if name in limits and int(value) >= limits[name][1]:
            what, count = limits[name]
            there = f"{what} 0 to {count - 1}" if count else f"no {what}"
        elif name == "DEVICE" and value not in shape.nic_names:
            there = f"mlx5_0 to {shape.nic_names[-1]}" if shape.nics else "no network adapter"
        elif name == "CALL" and value not in CALLS:
            there = f"no such call; it has {', '.join(CALLS)}"
        if there:
            raise DevClusterError(f"{_quoted(text)}: this node has {there}")


def target_table() -> str:
    """Return the table of ``docs/devcluster.md``."""
    escaped = [(target, target.syntax.replace("|", "\\|")) for target in TARGETS]
    rows = [f"| `{syntax}` | {target.does} | {target.seen_by} |" for target, syntax in escaped]
    return "\n".join(["| fault | what it does | seen by |", "|---|---|---|", *rows])
