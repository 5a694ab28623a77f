"""NVLink errors that keep coming."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvlinks import active_links
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "NVLink recovery, receive, retry, replay and CRC counters"
_STATE = "nvlink-errors"


class NvlinkErrorsSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window: Annotated[int, msgspec.Meta(ge=2, le=1000, description="samples that are looked at")] = 30
    flagged: Annotated[
        int, msgspec.Meta(ge=1, le=1000, description="more samples than this with new errors are a fail")
    ] = 15
    interval_s: Annotated[float, msgspec.Meta(ge=0, description="samples are at least this far apart")] = 60.0


class LinkWindow(msgspec.Struct, frozen=True):
    """What is remembered of one link."""

    counters: dict[str, int]
    flags: list[bool]
    """One per sample, oldest first: some counter had risen."""

    def advance(self, counters: dict[str, int], size: int) -> LinkWindow:
        """Return the window with one more sample. A counter that has fallen was reset: no error."""
        rose = any(value > self.counters.get(key, value) for key, value in counters.items())
        return LinkWindow(counters, [*self.flags, rose][-size:])


class NvlinkHistory(msgspec.Struct, frozen=True):
    boot_id: str
    sampled: float
    """Unix seconds."""
    links: dict[str, LinkWindow]
    """By ``UUID/link``."""


@check("nvlink-errors", stages=EVERY_STAGE, needs=(Need.NVML, Need.STATE), settings=NvlinkErrorsSettings)
def nvlink_errors(node: Node, settings: NvlinkErrorsSettings) -> list[CheckResult]:
    """No NVLink makes errors again and again.

    Every run takes a sample of each active link's error counters and remembers whether one had risen. A link
    with more than ``flagged`` such samples in the last ``window`` is a fail; single errors are normal, and
    never add up to one. What was remembered does not outlive a boot. A GPU of whose links none can be read is
    a warn.
    """
    if node.state.path is None:
        return [skip("there is no state directory to remember samples in", _SIGNAL)]
    history = node.state.load(_STATE, NvlinkHistory)
    now = node.clock.now()
    if history is None or history.boot_id != node.boot_id or history.sampled > now:
        history = NvlinkHistory(node.boot_id, 0.0, {})
    due = now - history.sampled >= settings.interval_s
    links = dict(history.links)

    def look(gpu: int) -> list[CheckResult]:
        uuid = node.nvml.uuid(gpu)
        found = []
        active, unreadable = active_links(node.nvml, gpu)
        if unreadable and not active:
            return [warn(f"no NVLink can be read: {unreadable.popitem()[1]}", _SIGNAL, name(gpu))]
        for link in active:
            key = f"{uuid}/{link}"
            if due:
                read = node.nvml.nvlink_errors(gpu, link)
                counters = {counter.value: count for counter, count in read.items()}
                links[key] = links.get(key, LinkWindow(counters, [])).advance(counters, settings.window)
            flags = links[key].flags if key in links else []
            if sum(flags) > settings.flagged:
                evidence = f"NVLink {link}: new errors in {sum(flags)} of the last {len(flags)} samples"
                remedy = "reset the GPU; look at the NVLink bridge or baseboard if errors come back"
                found.append(fail(evidence, _SIGNAL, name(gpu), remedy=remedy))
        return found

    results = each_gpu(node, _SIGNAL, look)
    if due:
        node.state.save(_STATE, NvlinkHistory(node.boot_id, now, links))
    return results
