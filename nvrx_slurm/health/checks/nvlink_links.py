"""NVLinks that are up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvlinks import active_links
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "nvmlDeviceGetNvLinkState"
_REMEDY = "reset the GPU; look at the NVLink bridge or baseboard if the link stays down"


class NvlinkLinksSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expected: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=36)] | None,
        msgspec.Meta(description="active links of every GPU; null: as in the baseline"),
    ] = None


@check("nvlink-links", stages=EVERY_STAGE, needs=(Need.NVML, Need.BASELINE), settings=NvlinkLinksSettings)
def nvlink_links(node: Node, settings: NvlinkLinksSettings) -> list[CheckResult]:
    """All NVLinks are active.

    Counts the active links of every GPU. Fewer than configured, or one that was active at the baseline and is
    not now, is a fail. Without either, a GPU with fewer links than its neighbours is a warn. So is a link
    that can't be read.
    """
    known = node.baseline.nvlinks if node.baseline is not None else {}
    found: dict[int, list[int]] = {}

    def look(gpu: int) -> Iterable[CheckResult]:
        active, unreadable = active_links(node.nvml, gpu)
        found[gpu] = active
        for link, error in unreadable.items():
            yield warn(f"link {link} can't be read: {error}", _SIGNAL, name(gpu))
        down = sorted(set(known.get(node.nvml.uuid(gpu), ())) - set(active) - set(unreadable))
        if down:
            evidence = f"NVLink {', '.join(map(str, down))} down"
            yield fail(evidence, _SIGNAL, name(gpu), remedy=_REMEDY)
        elif settings.expected is not None and len(active) + len(unreadable) < settings.expected:
            evidence = f"{len(active)} of {settings.expected} NVLinks active"
            yield fail(evidence, _SIGNAL, name(gpu), remedy=_REMEDY)

    results = each_gpu(node, _SIGNAL, look)
    most = max(map(len, found.values()), default=0)
    if not known and settings.expected is None:
        results += [
            warn(f"{len(active)} NVLinks active, {most} on another GPU", _SIGNAL, name(gpu), _REMEDY)
            for gpu, active in found.items()
            if len(active) < most
        ]
    return results
