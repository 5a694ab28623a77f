"""The node's clock."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, warn
from nvrx_slurm.health.stage import Stage

_SIGNAL = "scontrol show config"
_REMEDY = "look at chronyd or ntpd"


class ClockSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warn_s: Annotated[float, msgspec.Meta(ge=1, description="more seconds apart are a warn")] = 5.0
    fail_s: Annotated[float, msgspec.Meta(ge=1, description="more seconds apart are a fail")] = 60.0


@check(
    "clock",
    stages=(Stage.PERIODIC, Stage.MANUAL),
    needs=(Need.CONTROLLER,),
    settings=ClockSettings,
    budget_s=6.0,
    strikes=2,
)
def clock(node: Node, settings: ClockSettings) -> list[CheckResult]:
    """The clock agrees with the Slurm controller's.

    Compares with the time that scontrol gets from the controller, in whole seconds, allowing for how long
    that took. munge refuses messages of a node that is minutes off. Not run in hooks: they should not call
    Slurm.
    """
    before = node.clock.now()
    controller = node.controller.now()
    after = node.clock.now()
    # The controller's second lasts one, and its answer came somewhere between before and after.
    ahead, behind = before - (controller + 1.0), controller - after
    skew = max(ahead, behind, 0.0)
    evidence = f"{skew:.0f} s {'ahead of' if ahead > behind else 'behind'} the controller"
    if skew > settings.fail_s:
        return [fail(evidence, _SIGNAL, remedy=_REMEDY)]
    if skew > settings.warn_s:
        return [warn(evidence, _SIGNAL, remedy=_REMEDY)]
    return [ok("agrees with the controller's", _SIGNAL)]
