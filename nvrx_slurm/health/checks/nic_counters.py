"""Errors on the network's links since the baseline."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.nics import CLASS, Port, is_named, ports
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_REMEDY = "look at cable, transceiver and switch port"


class NicCountersSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    link_downed: Annotated[
        int, msgspec.Meta(ge=1, description="so many losses of the link since the baseline are a fail")
    ] = 1
    symbol_error: Annotated[int, msgspec.Meta(ge=1, description="so many new symbol errors are a warn")] = 100
    port_rcv_errors: Annotated[
        int, msgspec.Meta(ge=1, description="so many new receive errors are a warn")
    ] = 100
    unused: Annotated[
        tuple[str, ...], msgspec.Meta(description="adapters or ports that nobody looks at")
    ] = ()


@check(
    "nic-counters",
    stages=EVERY_STAGE,
    needs=(Need.SYSFS, Need.BASELINE),
    settings=NicCountersSettings,
    lane="nic",
)
def nic_counters(node: Node, settings: NicCountersSettings) -> list[CheckResult]:
    """No link went down since the baseline.

    Compares link_downed, symbol_error and port_rcv_errors of every port with the baseline of this boot: a new
    loss of the link is a fail, many new errors are a warn. Without a baseline there is nothing to compare
    with. A counter that has fallen was reset, and is compared with 0. One of the baseline that can't be read
    any more is a warn.
    """
    baseline = node.baseline_of_this_boot
    if baseline is None:
        return [skip("there is no baseline of this boot: nvrx-health baseline takes one", CLASS)]
    looked_at = [
        port
        for port in ports(node.tree)
        if port.name in baseline.ports and not is_named(port, settings.unused)
    ]
    results: list[CheckResult] = []
    for port in looked_at:
        results += _port(node, settings, port, baseline.ports[port.name].counters)
    return results or [ok(f"{len(looked_at)} ports without new errors", CLASS)]


def _port(node: Node, settings: NicCountersSettings, port: Port, before: dict[str, int]) -> list[CheckResult]:
    counters, trouble = port.counters(node.tree)
    results = [warn(f"can't be read: {error.why}", error.signal, port.scope) for error in trouble]
    told = {error.signal for error in trouble}
    results += [
        warn("can't be read any more", path, port.scope)
        for name in before
        if name not in counters and (path := f"{port.path}/counters/{name}") not in told
    ]
    for name, value in counters.items():
        past = before.get(name)
        if past is None:
            continue
        new = value - past if value >= past else value
        signal = f"{port.path}/counters/{name}"
        if new < getattr(settings, name):
            continue
        evidence = f"{name} +{new} since the baseline"
        if name == "link_downed":
            results.append(fail(evidence, signal, port.scope, remedy=_REMEDY))
        else:
            results.append(warn(evidence, signal, port.scope, _REMEDY))
    return results
