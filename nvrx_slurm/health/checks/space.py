"""Room on local and shared file systems."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import msgspec

from nvrx_slurm.health.isolation import call_isolated
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.other_jobs import other_jobs
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, Status, fail, ok, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "statvfs"
_ANSWER_S = 1.5
_REMEDY = "remove what nobody needs"


class SpaceSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    paths: Annotated[
        tuple[str, ...], msgspec.Meta(description="one path of every file system to look at")
    ] = (
        "/",
        "/tmp",
        "/var",
        "/dev/shm",
    )
    warn_percent: Annotated[float, msgspec.Meta(ge=0, le=100, description="less free is a warn")] = 10.0
    fail_percent: Annotated[float, msgspec.Meta(ge=0, le=100, description="less free is a fail")] = 1.0


class Room(msgspec.Struct, frozen=True):
    """Percent that is free; 100 for a file system that does not count inodes."""

    bytes: float
    inodes: float


@check("space", stages=EVERY_STAGE, needs=(Need.FILE_SYSTEMS,), settings=SpaceSettings, strikes=2)
def space(node: Node, settings: SpaceSettings) -> list[CheckResult]:
    """The file systems that every job needs have bytes and inodes free.

    Asks statvfs for each path, in a child process of its own. /dev/shm counts: ranks exchange data there. A
    path that is not there is nothing to look at. While another job runs on the node it is a warn: what the
    job has written goes with it.
    """
    calls: dict[str, Callable[[], object]] = {path: _call(str(node.tree.at(path))) for path in settings.paths}
    results = []
    for path, answer in call_isolated(calls, _ANSWER_S, list[Room]).items():
        scope = f"path {path}"
        if answer.value is None:
            results.append(warn(f"statvfs: {answer.trouble}", _SIGNAL, scope))
        for room in answer.value or ():
            results += _judge(room, scope, settings)
    if any(result.status is Status.FAIL for result in results) and other_jobs(node):
        results = [_of_a_job(result) for result in results]
    return results or [ok(f"{len(calls)} paths with room", _SIGNAL)]


def _of_a_job(result: CheckResult) -> CheckResult:
    evidence = f"{result.evidence}, while a job runs here"
    return warn(evidence, result.signal, result.scope, result.remedy)


def _judge(room: Room, scope: str, settings: SpaceSettings) -> list[CheckResult]:
    free = min(room.bytes, room.inodes)
    what = "space" if room.bytes <= room.inodes else "inodes"
    evidence = f"{free:.1f} % of its {what} free"
    if free < settings.fail_percent:
        return [fail(evidence, _SIGNAL, scope, remedy=_REMEDY)]
    if free < settings.warn_percent:
        return [warn(evidence, _SIGNAL, scope, _REMEDY)]
    return []


def _call(path: str) -> Callable[[], object]:
    return lambda: look(path)


def look(path: str) -> list[Room]:
    """Return what is free; nothing if there is no such path. May hang for ever."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return []
    return [Room(_percent(found.f_bavail, found.f_blocks), _percent(found.f_favail, found.f_files))]


def _percent(free: int, total: int) -> float:
    return 100.0 * free / total if total > 0 else 100.0
