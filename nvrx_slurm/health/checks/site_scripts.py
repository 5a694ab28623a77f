"""Checks that the site brings itself."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from nvrx_slurm.health.isolation import Answer, call_isolated
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.trust import why_untrusted
from nvrx_slurm.health.unavailable import UnavailableError

_FAIL = 2
"""Also of shells that can't read a script, of programs that are called wrongly: it needs a reason, too."""
_REMEDY = "what the script's author says"
_NO_SCRIPTS = (".", "#", "_")
_NO_ENDINGS = ("~", ".bak", ".orig", ".rpmsave", ".rpmnew", ".dpkg-old", ".dpkg-new", ".md", ".txt")


class SiteScriptsSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    directory: Annotated[str, msgspec.Meta(pattern=r"^/", description="where the scripts are")] = (
        "/etc/nvrx/checks.d"
    )
    answer_s: Annotated[
        float, msgspec.Meta(gt=0, le=300, description="every script must have ended by then; below timeout_s")
    ] = 4.0


class Ended(msgspec.Struct, frozen=True):
    """What a script said; trouble: it could not be run to its end."""

    code: int = 0
    reason: str = ""
    trouble: str = ""


@check("site-scripts", stages=EVERY_STAGE, needs=(Need.COMMANDS,), settings=SiteScriptsSettings, budget_s=5.0)
def site_scripts(node: Node, settings: SiteScriptsSettings) -> list[CheckResult]:
    """The site's own scripts have nothing to complain about.

    Runs every executable file of the directory, all at the same time. Exit code 0: ok, 1: warn, 2: fail,
    3: skip; the first line that it prints is the reason. A fail needs one on standard output: a shell that
    can't read a script ends with 2 as well. Anything else, a time-out too, is a warn. NVRX_STAGE
    in their environment tells the stage, SLURM_JOB_ID the job, SLURMD_NODENAME the node; NVRX_ACCUSED is 1 in
    the epilog of a job that has blamed the node. Root runs only what belongs to root and nobody else can
    write.
    """
    directory = node.tree.at(settings.directory)
    names = [name for name in node.tree.names(settings.directory) if _is_script(name)]
    if not names:
        return [skip("there are no site scripts", settings.directory)]
    if node.is_root and (why := _untrusted(directory)):
        return [warn(f"not run: {why}", settings.directory, remedy="chown root, chmod go-w")]
    results = []
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        if why := _why_not(directory / name, node.is_root):
            signal = f"{settings.directory}/{name}"
            results.append(warn(f"not run: {why}", signal, f"script {name}"))
        else:
            calls[name] = _call(node, directory / name, settings.answer_s)
    answers = call_isolated(calls, settings.answer_s + 0.5, Ended)
    results += [judge(name, answers[name], f"{settings.directory}/{name}") for name in calls]
    return results


def _is_script(name: str) -> bool:
    return not name.startswith(_NO_SCRIPTS) and not name.endswith(_NO_ENDINGS)


def _untrusted(path: Path) -> str:
    try:
        return why_untrusted(path.stat())
    except OSError as error:
        return str(error.strerror)


def _why_not(path: Path, is_root: bool) -> str:
    """Return why a script is not run; empty if it is."""
    try:
        status = path.stat()
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISREG(status.st_mode):
        return "it is no file"
    if not os.access(path, os.X_OK):
        return "it is not executable"
    return why_untrusted(status) if is_root else ""


def _call(node: Node, path: Path, timeout_s: float) -> Callable[[], object]:
    environ = {
        "NVRX_STAGE": node.stage.value,
        "SLURM_JOB_ID": node.job.job_id,
        "SLURMD_NODENAME": node.host,
        "NVRX_ACCUSED": "1" if node.job.accused else "",
    }

    def run() -> Ended:
        try:
            done = node.programs.run([str(path)], timeout_s, environ)
        except UnavailableError as error:
            return Ended(trouble=error.why)
        if done.code == _FAIL and not done.output:
            return Ended(trouble=f"exit code 2 without a reason on standard output: {done.errors[:120]}")
        return Ended(done.code, (done.output or done.errors).partition("\n")[0].strip()[:160])

    return run


def judge(name: str, answer: Answer[Ended], path: str) -> CheckResult:
    """Return the verdict on one script."""
    scope = f"script {name}"
    if answer.value is None:
        return warn(answer.trouble, path, scope)
    ended = answer.value
    if ended.trouble:
        return warn(ended.trouble, path, scope)
    said = ended.reason or "(it gave no reason)"
    match ended.code:
        case 0:
            return ok(ended.reason or "ok", path, scope)
        case 1:
            return warn(said, path, scope, _REMEDY)
        case 2:
            return fail(said, path, scope, remedy=_REMEDY)
        case 3:
            return skip(said, path, scope)
        case code if code < 0:
            return warn(f"was killed by signal {-code}: {said}", path, scope)
        case code:
            return warn(f"exit code {code} is none of 0 to 3: {said}", path, scope)
