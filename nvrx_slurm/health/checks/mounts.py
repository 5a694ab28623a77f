"""File systems that should be mounted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "/proc/self/mountinfo"
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


class MountsSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expected: Annotated[
        dict[str, str],
        msgspec.Meta(description="mount point to type, as {/scratch: lustre}; an empty type: any"),
    ] = msgspec.field(default_factory=dict)
    read_only: Annotated[
        tuple[str, ...], msgspec.Meta(description="those that are meant to be mounted read-only")
    ] = ()


@check("mounts", stages=EVERY_STAGE, needs=(Need.PROCFS,), settings=MountsSettings, lane="host")
def mounts(node: Node, settings: MountsSettings) -> list[CheckResult]:
    """Every expected file system is mounted, of the right type, and writable.

    Reads /proc/self/mountinfo, which does not ask the file systems themselves. A missing mount, another type
    and an unexpected read-only mount are fails. A type matches by its beginning: nfs fits nfs4.
    """
    if not settings.expected:
        return [skip("nothing is configured: checks: mounts: expected", _SIGNAL)]
    mounted = parse_mountinfo(node.tree.text(_SIGNAL))
    results = []
    for point, kind in settings.expected.items():
        problem = _problem(mounted.get(point.rstrip("/") or "/"), kind, point in settings.read_only)
        if problem:
            remedy = f"mount {point}; look for it in /etc/fstab and in the kernel log"
            results.append(fail(problem, _SIGNAL, f"path {point}", remedy=remedy))
    return results or [ok(f"{len(settings.expected)} mounted as expected", _SIGNAL)]


def _problem(mount: tuple[str, bool] | None, kind: str, read_only_is_fine: bool) -> str:
    if mount is None:
        return "not mounted"
    mounted_kind, read_only = mount
    if not mounted_kind.startswith(kind):
        return f"is {mounted_kind[:20]}, not {kind}"
    return "is read-only" if read_only and not read_only_is_fine else ""


def parse_mountinfo(text: str) -> Mapping[str, tuple[str, bool]]:
    """Return type and read-only by mount point; the uppermost counts (proc_pid_mountinfo(5))."""
    found = {}
    for line in text.splitlines():
        fields, dash, tail = line.partition(" - ")
        words, rest = fields.split(" "), tail.split(" ")
        if not dash or len(words) < 6 or len(rest) < 3:
            continue
        point = words[4]
        for escape, character in _ESCAPES.items():
            point = point.replace(escape, character)
        read_only = "ro" in words[5].split(",") or "ro" in rest[2].split(",")
        found[point] = (rest[0], read_only)
    return found
