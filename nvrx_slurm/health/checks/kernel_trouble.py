"""What the kernel says of itself."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, ok, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "/dev/kmsg"
# The kernel tells of programs, too, and begins with their names, which are any 15 characters; paths of users
# stand further behind. So each pattern is longer than a name from the beginning of the line on.
_BROKEN = re.compile(
    r"^(BUG: unable to handle|Oops: (Oops: )?[0-9a-f]{4,16} \[#\d+\] [A-Z]|general protection fault"
    r"|(NMI )?watchdog: (CPU\d+: )?Watchdog detected hard LOCKUP on cpu \d"
    r"|watchdog: CPU \d+ ((self-)?detected )?[hH]ard LOCKUP)"
)
_LOCKUP = re.compile(r"^(watchdog: )?BUG: soft lockup - CPU#\d+ stuck|^rcu: INFO: \S+ self-detected stall")
_HUNG = re.compile(r"^INFO: task \S+ blocked for more than \d+ seconds")


class KernelTroubleSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lockups: Annotated[
        int, msgspec.Meta(ge=1, description="so many soft lockups or RCU stalls are a fail; fewer a warn")
    ] = 3


@check(
    "kernel-trouble",
    stages=EVERY_STAGE,
    needs=(Need.KERNEL_LOG,),
    settings=KernelTroubleSettings,
    lane="host",
)
def kernel_trouble(node: Node, settings: KernelTroubleSettings) -> list[CheckResult]:
    """The kernel has not crashed or stood still.

    Looks in the kernel log, since the baseline, or without one since the job began, for oopses and hard
    lockups (fail), soft lockups and RCU stalls (fail when there are several), and hung tasks (warn:
    mostly a file server's fault).
    """
    texts = [record.text for record in node.recent_kernel_records()]
    results = []
    remedy = "reboot; keep the kernel log for whoever looks for the cause"
    if broken := [text for text in texts if _BROKEN.match(text)]:
        results.append(fail(broken[-1][:120], _SIGNAL, remedy=remedy, action=Action.REBOOT))
    if lockups := [text for text in texts if _LOCKUP.match(text)]:
        evidence = f"{len(lockups)} lockups, last: {lockups[-1][:100]}"
        if len(lockups) >= settings.lockups:
            results.append(fail(evidence, _SIGNAL, remedy=remedy, action=Action.REBOOT))
        else:
            results.append(warn(evidence, _SIGNAL))
    if hung := [text for text in texts if _HUNG.match(text)]:
        results.append(warn(f"{len(hung)} hung tasks, last: {hung[-1][:100]}", _SIGNAL))
    return results or [ok("nothing in the kernel log", _SIGNAL)]
