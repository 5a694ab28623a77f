"""Errors that the NVIDIA driver writes to the kernel log."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, Status, ok
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.xid import Severity, XidPolicy, load_policy, parse_switch_xid, parse_xid

_SIGNAL = "/dev/kmsg: NVRM: Xid"
_SWITCH = "/dev/kmsg: nvidia-nvswitch SXid"


class GpuXidSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    severity: Annotated[
        dict[int, Severity],
        msgspec.Meta(
            description="Xid to ignore, application, monitor, reset, reboot or isolate; over our table"
        ),
    ] = msgspec.field(default_factory=dict)


@check(
    "gpu-xid",
    stages=EVERY_STAGE,
    needs=(Need.KERNEL_LOG, Need.BASELINE),
    settings=GpuXidSettings,
    lane="host",
)
def gpu_xid(node: Node, settings: GpuXidSettings) -> list[CheckResult]:
    """The driver has logged no error that a GPU does not recover from.

    Reads the kernel log since the baseline of this boot, or without one since the job began, so that a
    repaired node is not blamed again. What each Xid means is in health/xid_policy.yaml, with its sources:
    reset, reboot and isolate are fails, monitor and Xids that the table does not know are warns, errors of
    the application are none. Fatal SXids of NVSwitches are fails.
    """
    records = [record.text for record in node.recent_kernel_records()]
    events = [event for text in records if (event := parse_xid(text)) is not None]
    switches = [sxid for text in records if (sxid := parse_switch_xid(text)) is not None]
    policy: XidPolicy = load_policy() if events else XidPolicy("", {})
    results = []
    for (code, gpu), times in Counter((event.code, event.pci) for event in events).items():
        last = [event for event in events if (event.code, event.pci) == (code, gpu)][-1]
        severity, title = policy.judge(last, settings.severity)
        if severity in (Severity.IGNORE, Severity.APPLICATION):
            continue
        results.append(_result(severity, f"Xid {code} {title}".rstrip(), times, f"gpu {gpu}", code))
    for sxid in switches:
        severity = Severity.REBOOT if sxid.fatal else Severity.MONITOR
        results.append(_result(severity, f"SXid {sxid.code}", 1, f"nvswitch {sxid.pci}", None))
    return results or [ok("no Xid to act on", _SIGNAL)]


def _result(severity: Severity, what: str, times: int, scope: str, code: int | None) -> CheckResult:
    again = f", {times} times" if times > 1 else ""
    status = Status.WARN if severity is Severity.MONITOR else Status.FAIL
    remedies = {
        Severity.MONITOR: "",
        Severity.RESET: "reset the GPU",
        Severity.REBOOT: "reboot",
        Severity.ISOLATE: "take the node out, and have the GPU and its power looked at",
    }
    return CheckResult(
        status,
        f"{what}{again}"[:160],
        _SIGNAL if code is not None else _SWITCH,
        scope,
        remedies[severity],
        Action(severity.value),
        # 79: the GPU has fallen off the bus.
        node_lost=code == 79 and status is Status.FAIL,
    )
