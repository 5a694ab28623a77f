"""Xids: the NVIDIA driver's error messages in the kernel log, and what each means for the node."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

_XID = re.compile(r"^NVRM: Xid \(PCI:([0-9a-fA-F:.]{7,20})\): (\d{1,5})(.*)")
_SWITCH_XID = re.compile(
    r"^nvidia-nvswitch\d+: SXid \(PCI:([0-9a-fA-F:.]{7,20})\): (\d{1,6}), (Non-fatal|Fatal)\b"
)
_NEW_ACTION = re.compile(r"to 0x([0-9a-fA-F]{1,8})")
_RECOVERY_ACTION_CHANGED = 154
POLICY_FILE = Path(__file__).with_name("xid_policy.yaml")


class Severity(str, enum.Enum):
    """What an Xid says of the GPU."""

    IGNORE = "ignore"
    APPLICATION = "application"
    """The program's doing."""
    MONITOR = "monitor"
    RESET = "reset"
    REBOOT = "reboot"
    ISOLATE = "isolate"


_BY_RECOVERY_ACTION = {
    0: Severity.IGNORE,
    1: Severity.RESET,
    2: Severity.REBOOT,
    3: Severity.RESET,
    4: Severity.RESET,
}


@dataclass(frozen=True)
class XidEvent:
    code: int
    pci: str
    """As the driver writes it: ``0000:3b:00``."""
    detail: str


@dataclass(frozen=True)
class SwitchXidEvent:
    code: int
    pci: str
    fatal: bool


def parse_xid(text: str) -> XidEvent | None:
    """Return the Xid in one message of the kernel log; None if it is none."""
    found = _XID.match(text)
    return XidEvent(int(found[2]), found[1], found[3].lstrip(", ")[:200]) if found else None


def parse_switch_xid(text: str) -> SwitchXidEvent | None:
    """Return the NVSwitch's error in one message of the kernel log; None if it is none."""
    found = _SWITCH_XID.match(text)
    return SwitchXidEvent(int(found[2]), found[1], found[3] == "Fatal") if found else None


class XidEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the policy."""

    severity: Severity
    sources: list[str]
    """Which published lists say so; keys of the file's ``sources``."""
    title: str = ""


class _PolicyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    sources: dict[str, str]
    xids: dict[int, XidEntry]


@dataclass(frozen=True)
class XidPolicy:
    """The table that comes with the package."""

    version: str
    entries: Mapping[int, XidEntry]

    def judge(self, event: XidEvent, site: Mapping[int, Severity]) -> tuple[Severity, str]:
        """Return severity and title; the site's word counts first. An Xid that nobody knows is to be
        watched."""
        entry = self.entries.get(event.code)
        title = entry.title if entry is not None else "(not in the table)"
        if event.code in site:
            return site[event.code], title
        if event.code == _RECOVERY_ACTION_CHANGED:
            return _recovery_action(event.detail), title
        return (entry.severity if entry is not None else Severity.MONITOR), title


def _recovery_action(detail: str) -> Severity:
    found = _NEW_ACTION.search(detail)
    return _BY_RECOVERY_ACTION.get(int(found[1], 16), Severity.MONITOR) if found else Severity.MONITOR


@cache
def load_policy() -> XidPolicy:
    """Read the table; done only when there is an Xid to look up.

    Raises:
        ValueError: the file is damaged.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = msgspec.convert(yaml.load(POLICY_FILE.read_text(encoding="utf-8"), Loader=loader), _PolicyFile)
    for code, entry in found.xids.items():
        for source in entry.sources:
            if source not in found.sources:
                raise ValueError(f"{POLICY_FILE}: Xid {code}: source {source!r} is not explained")
    return XidPolicy(found.version, found.xids)
