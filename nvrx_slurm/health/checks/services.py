"""Daemons that must run."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import NODE_STAGES

_DOWN = ("inactive", "failed", "deactivating")
_STATES = (*_DOWN, "active", "activating", "reloading", "maintenance")


class ServicesSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    required: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9@:._\\-]*$")], ...],
        msgspec.Meta(description="systemd units that must be active, as nvidia-fabricmanager, munge"),
    ] = ()


@check(
    "services", stages=NODE_STAGES, needs=(Need.COMMANDS,), settings=ServicesSettings, budget_s=3.0, strikes=2
)
def services(node: Node, settings: ServicesSettings) -> list[CheckResult]:
    """Every required service is active.

    Asks ``systemctl is-active`` for all of them at once. inactive, failed and deactivating are fails, any
    other state but active is a warn.
    """
    if not settings.required:
        return [skip("nothing is configured: checks: services: required", "systemctl")]
    argv = ("systemctl", "is-active", *settings.required)
    done = node.programs.run(argv, timeout_s=2.5)
    states = done.output.split()
    if len(states) != len(settings.required) or not set(states) <= set(_STATES):
        return [warn(f"systemctl says {(done.output or done.errors)[:80]!r}", " ".join(argv[:2]))]
    results = []
    for service, state in zip(settings.required, states, strict=True):
        signal, scope = f"systemctl is-active {service}", f"service {service}"
        if state in _DOWN:
            remedy = f"systemctl status {service}; start it"
            results.append(fail(state, signal, scope, remedy=remedy))
        elif state != "active":
            results.append(warn(state, signal, scope))
    return results or [ok(f"{len(states)} active", "systemctl is-active")]
