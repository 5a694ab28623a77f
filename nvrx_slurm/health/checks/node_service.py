"""The node's own health daemon."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.node_service_rpc import METHOD, ServiceAnswer, run_health_check
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_REMEDY = "see what the health daemon of this node says"


class NodeServiceSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: Annotated[
        str, msgspec.Meta(pattern=r"^(/.*)?$", description="the daemon's Unix socket; empty: there is none")
    ] = ""
    args: Annotated[tuple[str, ...], msgspec.Meta(description="passed on to the daemon")] = ("--no-slurm",)
    answer_s: Annotated[
        float, msgspec.Meta(gt=0, le=300, description="how long the daemon may take; below timeout_s")
    ] = 8.0


@check("node-service", stages=EVERY_STAGE, needs=(Need.SOCKET,), settings=NodeServiceSettings, budget_s=9.0)
def node_service(node: Node, settings: NodeServiceSettings) -> list[CheckResult]:
    """The node's health daemon has nothing to complain about.

    Calls nvhcd.HealthCheckService/RunHealthCheck on the configured socket, each time anew: a daemon that
    starts later is found. An answer without success, or whose JSON output counts failures in fail_count, is a
    fail. No answer, and an answer without such a count, are warns.
    """
    if not settings.socket:
        return [skip("nothing is configured: checks: node-service: socket", METHOD)]
    path = str(node.tree.at(settings.socket))
    if not os.path.exists(path):
        return [warn("the daemon's socket is not there", settings.socket, remedy="start the daemon")]
    # The library's notes on stderr would look like findings.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        answer = run_health_check(path, settings.args, settings.answer_s)
    except ConnectionError as error:
        return [
            warn(f"the daemon does not answer: {error}", settings.socket, remedy="look at the daemon's log")
        ]
    return [judge(answer, settings.socket)]


def judge(answer: ServiceAnswer, socket: str) -> CheckResult:
    """Return the verdict on one answer of the daemon."""
    signal = f"{METHOD} at {socket}"
    failed = _failures(answer.output)
    if answer.success and failed is None:
        return warn("success, but its output has no fail_count", signal)
    if answer.success and not failed:
        return ok("success", signal)
    said = answer.error.strip() or answer.output.strip() or f"exit code {answer.exit_code}"
    counted = f"{failed} failed: " if failed else ""
    return fail(f"{counted}{said.splitlines()[0][:160]}", signal, remedy=_REMEDY)


def _failures(output: str) -> int | None:
    """Return ``fail_count`` of the daemon's JSON; None if it writes something else."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(output)
        count = document.get("fail_count") if isinstance(document, dict) else None
        if isinstance(count, int) and not isinstance(count, bool):
            return max(count, 0)
    return None
