"""Ports that are up."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.nics import ACTIVE, CLASS, Port, is_named, ports
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.unavailable import UnavailableError

_REMEDY = "look at cable, transceiver and switch port"


class NicStateSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expected: Annotated[
        tuple[str, ...], msgspec.Meta(description="adapters or ports that must be up; beside the baseline's")
    ] = ()
    unused: Annotated[
        tuple[str, ...], msgspec.Meta(description="adapters or ports that nobody looks at")
    ] = ()
    rate_gbps: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        msgspec.Meta(description="rate of every port; null: as in the baseline"),
    ] = None


@check(
    "nic-state", stages=EVERY_STAGE, needs=(Need.SYSFS, Need.BASELINE), settings=NicStateSettings, lane="nic"
)
def nic_state(node: Node, settings: NicStateSettings) -> list[CheckResult]:
    """Every port that should be up is up, at its full rate.

    Reads state, phys_state and rate of each port. Not ACTIVE is a fail where the port is configured as
    expected, or was ACTIVE at the baseline; elsewhere it is a warn, because a port may have no cable. A rate
    below the configured one, or the baseline's, is a fail.
    """
    looked_at = [port for port in ports(node.tree) if not is_named(port, settings.unused)]
    if not looked_at:
        return [skip("there is no InfiniBand, RoCE or EFA port to look at", CLASS)]
    results: list[CheckResult] = []
    for port in looked_at:
        try:
            results += _port(node, settings, port)
        except UnavailableError as error:
            results.append(warn(f"can't be read: {error.why}", error.signal, port.scope))
    return results or [ok(f"{len(looked_at)} ports up", CLASS)]


def _port(node: Node, settings: NicStateSettings, port: Port) -> list[CheckResult]:
    before = node.baseline.ports.get(port.name) if node.baseline is not None else None
    state = port.state(node.tree)
    if state != ACTIVE:
        evidence = f"{state}, {_physical(node, port)}"
        if is_named(port, settings.expected) or (before is not None and before.state == ACTIVE):
            return [fail(evidence, f"{port.path}/state", port.scope, remedy=_REMEDY)]
        remedy = "name the port under expected or unused of nic-state in the configuration"
        return [warn(evidence, f"{port.path}/state", port.scope, remedy)]
    wanted = settings.rate_gbps or (before.rate_gbps if before is not None else None)
    if wanted is None:
        return []
    rate = port.rate_gbps(node.tree)
    if rate < wanted:
        return [fail(f"{rate:g} of {wanted:g} Gb/s", f"{port.path}/rate", port.scope, remedy=_REMEDY)]
    return []


def _physical(node: Node, port: Port) -> str:
    try:
        return port.state(node.tree, "phys_state")
    except UnavailableError as error:
        return f"phys_state {error.why}"
