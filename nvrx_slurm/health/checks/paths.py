"""Do the shared directories work?"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from nvrx_slurm.health.isolation import Answer, call_isolated
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "stat, listing, write and read of the path"
_BYTES = 4096
_MOST_ENTRIES = 1000
_BROKEN = (errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EROFS)
_REMEDY = "look at the file system's servers and at the kernel log; remount"
Probe = Literal["stat", "list", "write"]


class PathsSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    paths: Annotated[
        dict[str, Probe],
        msgspec.Meta(
            description="absolute path to what is tried there: stat, list, or write (writes and reads)"
        ),
    ] = msgspec.field(default_factory=dict)
    answer_s: Annotated[
        float, msgspec.Meta(gt=0, le=300, description="a path must have answered by then; below timeout_s")
    ] = 5.0


class Tried(msgspec.Struct, frozen=True):
    """What came of one path: an errno and where, or 0."""

    code: int
    what: str = ""


@check(
    "paths",
    stages=EVERY_STAGE,
    needs=(Need.FILE_SYSTEMS,),
    settings=PathsSettings,
    budget_s=6.0,
    strikes=2,
)
def paths(node: Node, settings: PathsSettings) -> list[CheckResult]:
    """Every declared path can be looked at, listed, and written.

    Each in a child process of its own, since a dead file server holds processes for ever. No answer in time,
    a stale handle, an input/output error, a file system that turned read-only, and data that does not come
    back as written are fails; so is a path that is not there. Not being allowed to is a warn.
    """
    if not settings.paths:
        return [skip("nothing is configured: checks: paths: paths", _SIGNAL)]
    calls: dict[str, Callable[[], object]] = {
        path: _call(node.tree.at(path), probe) for path, probe in settings.paths.items()
    }
    answers = call_isolated(calls, settings.answer_s, Tried)
    results = [result for path in calls if (result := _judge(path, answers[path])) is not None]
    return results or [ok(f"{len(calls)} paths work", _SIGNAL)]


def _call(path: Path, probe: Probe) -> Callable[[], object]:
    return lambda: try_path(path, probe)


def try_path(path: Path, probe: Probe) -> Tried:
    """Do what is to be tried; may hang for ever."""
    step = "stat"
    try:
        os.stat(path)
        if probe != "stat":
            step = "list"
            with os.scandir(path) as entries:
                for number, _ in enumerate(entries):
                    if number >= _MOST_ENTRIES:
                        break
        if probe == "write":
            step = "write"
            _write_and_read(path)
    except OSError as error:
        return Tried(error.errno or errno.EIO, step)
    return Tried(0)


def _write_and_read(path: Path) -> None:
    data = os.urandom(_BYTES)
    handle, name = tempfile.mkstemp(prefix=".nvrx-health.", dir=path)
    try:
        with os.fdopen(handle, "r+b") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            # What is in the page cache would be read back from there.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            if file.read() != data:
                raise OSError(errno.EIO, "read something else than was written")
    finally:
        os.unlink(name)


def _judge(path: str, answer: Answer[Tried]) -> CheckResult | None:
    scope = f"path {path}"
    if answer.late:
        return fail(answer.trouble, _SIGNAL, scope, remedy=_REMEDY)
    if answer.value is None:
        return warn(answer.trouble, _SIGNAL, scope)
    tried = answer.value
    if tried.code == 0:
        return None
    said = f"{tried.what}: {os.strerror(tried.code)}"
    if tried.code in (*_BROKEN, errno.ENOENT):
        return fail(said, _SIGNAL, scope, remedy=_REMEDY)
    return warn(said, _SIGNAL, scope, "look whether this user may use the path")
