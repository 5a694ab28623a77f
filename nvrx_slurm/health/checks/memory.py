"""The node's memory: how much there is, how much is free."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, ok, warn
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.unavailable import UnavailableError

_MEMINFO = "/proc/meminfo"
_GIB_IN_KIB = 1 << 20


class MemorySettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    total_gib: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        msgspec.Meta(description="GiB that the kernel must see; null: not compared"),
    ] = None
    available_percent: Annotated[
        float, msgspec.Meta(ge=0, le=100, description="less available is a warn")
    ] = 5.0


@check("memory", stages=EVERY_STAGE, needs=(Need.PROCFS,), settings=MemorySettings, lane="host")
def memory(node: Node, settings: MemorySettings) -> list[CheckResult]:
    """All memory modules are there, and some memory is available.

    Reads MemTotal and MemAvailable of /proc/meminfo. Less in total than configured is a fail: a module is
    gone.
    """
    fields = dict(line.partition(":")[::2] for line in node.tree.text(_MEMINFO).splitlines())
    total, available = _kib(fields, "MemTotal"), _kib(fields, "MemAvailable")
    results = []
    if settings.total_gib is not None and total < settings.total_gib * _GIB_IN_KIB:
        evidence = f"{total / _GIB_IN_KIB:.1f} of {settings.total_gib:g} GiB"
        remedy = "look at the BMC's log for a memory module that was taken out of use"
        results.append(fail(evidence, f"{_MEMINFO}: MemTotal", remedy=remedy, action=Action.ISOLATE))
    percent = 100.0 * available / total if total > 0 else 100.0
    if percent < settings.available_percent:
        evidence = f"{percent:.1f} % of memory available"
        results.append(warn(evidence, f"{_MEMINFO}: MemAvailable", remedy="look for what uses it"))
    return results or [ok(f"{percent:.0f} % of {total / _GIB_IN_KIB:.0f} GiB available", _MEMINFO)]


def _kib(fields: dict[str, str], key: str) -> int:
    number, _, unit = fields.get(key, "").strip().partition(" ")
    if not (number.isascii() and number.isdigit() and len(number) < 20 and unit == "kB"):
        raise UnavailableError(f"tells no {key}", _MEMINFO, expected=True)
    return int(number)
