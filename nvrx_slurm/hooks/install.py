"""Putting the hooks where slurmd finds them, and taking them away again."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from nvrx_slurm.health.trust import why_untrusted, why_untrusted_directory
from nvrx_slurm.whole_file import replace_file, replace_link

SCRIPT = "50-nvrx-health"
HOOK_DIRS = ("prolog.d", "epilog.d", "periodic.d")
_MARK = "has nvrx-health look at this node, within a bounded time."
_LIMIT_LINE = "limit_s=30"
_CONFIG = """\
# What nvrx-health checks on this node, and when; `nvrx-health explain CHECK` lists the keys of each check.
budget_s: 10
hooks:
  brake_share: 0.1    # so much of a partition may be drained for one check's failures
checks:
  site-scripts: {{directory: {prefix}/checks.d}}
"""


class InstallError(RuntimeError):
    """It can't be done; the message says why."""


def hook_text(limit_s: int) -> str:
    """Return the script that slurmd runs."""
    text = resources.files("nvrx_slurm.hooks").joinpath("scripts").joinpath(SCRIPT).read_text()
    assert _LIMIT_LINE in text
    return text.replace(_LIMIT_LINE, f"limit_s={limit_s}", 1)


def slurm_conf_lines(prefix: Path, limit_s: int) -> list[str]:
    """Return what slurm.conf needs for the hooks in ``prefix``, whose prologs are ended after ``limit_s``.

    DeferBatch: the batch script begins when every node's prolog has checked its node. nohold_on_prolog_fail
    is for prologs of others, and for a Slurm that refuses our own requeue.
    """
    return [
        f"Prolog={prefix}/prolog.d/*",
        f"Epilog={prefix}/epilog.d/*",
        "PrologFlags=Alloc,DeferBatch",
        # Slurm drains a node whose hook it had to end: an epilog may take three times as long as a prolog.
        f"PrologEpilogTimeout={max(120, 3 * limit_s + 30)}",
        f"HealthCheckProgram={prefix}/periodic.d/{SCRIPT}",
        "HealthCheckInterval=300",
        "HealthCheckNodeState=ANY,CYCLE",
        "SchedulerParameters=nohold_on_prolog_fail",
    ]


def install(prefix: Path, command: Path, limit_s: int, *, dry_run: bool = False) -> list[str]:
    """Write hooks, configuration and a link to ``command``; return what was done, one line each.

    Raises:
        InstallError: no absolute prefix, no such command, something of others in the way, or no permission.
    """
    # Resolved: it may be our own link that is being run.
    prefix, command = _usable(prefix), command.resolve()
    if not (command.is_file() and os.access(command, os.X_OK)):
        raise InstallError(f"{command}: this is not a command that slurmd could run")
    if limit_s < 25:
        raise InstallError(
            f"--limit {limit_s}s: accepted: 25s and more, 20s of it are kept for Slurm's answers"
        )
    with _told_as_install_error():
        warnings = _warnings(command, prefix)
        steps = _install_hooks(prefix, limit_s, dry_run=dry_run)
        steps += _link(prefix / "bin" / "nvrx-health", command, dry_run=dry_run)
        steps += _install_config(prefix, dry_run=dry_run)
        if not (prefix / "checks.d").exists():
            steps.append(f"make {prefix}/checks.d for the site's own checks")
            if not dry_run:
                (prefix / "checks.d").mkdir(mode=0o755, parents=True)
    return [*warnings, *_as_if(steps, dry_run=dry_run)]


def uninstall(prefix: Path, *, dry_run: bool = False) -> list[str]:
    """Remove what :func:`install` has written, unless it was changed; return what was done.

    Raises:
        InstallError: no absolute prefix, or no permission.
    """
    prefix = _usable(prefix)
    hooks = [path for path in _hook_paths(prefix) if path.is_file()]
    ours = [path for path in hooks if _MARK in path.read_text(errors="replace")]
    link, config = prefix / "bin" / "nvrx-health", prefix / "health.yaml"
    if link.is_symlink() and ours:
        ours.append(link)
    if config.is_file() and config.read_text(errors="replace") == _config_text(prefix):
        ours.append(config)
    with _told_as_install_error():
        for path in () if dry_run else ours:
            path.unlink()
        for directory in () if dry_run else (*HOOK_DIRS, "bin", "checks.d", "."):
            with contextlib.suppress(OSError):  # not empty: of the site's own, or not there
                (prefix / directory).rmdir()
    return _as_if([f"remove {path}" for path in ours], dry_run=dry_run)


def _hook_paths(prefix: Path) -> list[Path]:
    return [prefix / directory / SCRIPT for directory in HOOK_DIRS]


def _install_hooks(prefix: Path, limit_s: int, *, dry_run: bool) -> list[str]:
    steps = []
    for path in _hook_paths(prefix):
        there = path.read_text(errors="replace") if path.exists() else ""
        if there and _MARK not in there:
            raise InstallError(f"{path}: is there, and is not ours: take it away first")
        if there != hook_text(limit_s):
            steps.append(f"write {path}")
            if not dry_run:
                _write(path, hook_text(limit_s), 0o755)
    return steps


def _install_config(prefix: Path, *, dry_run: bool) -> list[str]:
    config = prefix / "health.yaml"
    if config.exists():
        return []
    if not dry_run:
        _write(config, _config_text(prefix), 0o644)
    return [f"write {config}"]


def _config_text(prefix: Path) -> str:
    """Return the configuration of a site that has decided nothing yet."""
    text = _CONFIG.format(prefix=prefix)
    scontrol = shutil.which("scontrol")
    found = ""
    if scontrol and str(Path(scontrol).parent) not in ("/usr/bin", "/usr/local/bin", "/bin", "/usr/sbin"):
        found += f"  slurm_bin: {Path(scontrol).parent}\n"
    if conf := os.environ.get("SLURM_CONF"):
        found += f"  slurm_conf: {conf}    # slurmd does not tell it to HealthCheckProgram\n"
    return text.replace("checks:\n", f"{found}checks:\n", 1)


def _link(link: Path, command: Path, *, dry_run: bool) -> list[str]:
    if link.is_symlink() and link.readlink() == command:
        return []
    if link.exists() and not link.is_symlink():
        raise InstallError(f"{link}: is there, and is not ours: take it away first")
    if not dry_run:
        link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_link(link, command)
    return [f"link {link} to {command}"]


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    replace_file(path, text.encode(), mode=mode)


def _warnings(command: Path, prefix: Path) -> list[str]:
    """Root will run what is there."""
    package = Path(__file__).resolve().parents[1]
    for real in (command.resolve(), Path(sys.executable).resolve(), package):
        why, path = why_untrusted(real.stat()), real
        for directory in real.parents:
            if not why:
                why, path = why_untrusted_directory(directory), directory
        if why:
            return [f"WARNING: {path}: {why}, and root will run it: install the package as root"]
    for directory in (prefix, *prefix.parents):
        if directory.exists() and (why := why_untrusted_directory(directory)):
            return [f"WARNING: {directory}: {why}, and root will run the hooks: take another --prefix"]
    return []


def _usable(prefix: Path) -> Path:
    if not prefix.is_absolute() or any(c.isspace() for c in str(prefix)):
        raise InstallError(f"--prefix {prefix}: accepted: an absolute path without white space")
    if (prefix / "nvrx_slurm" / "__init__.py").exists():
        raise InstallError(f"--prefix {prefix}: this is a clone of nvrx-slurm, which has its own hooks")
    return prefix


def _as_if(steps: list[str], *, dry_run: bool) -> list[str]:
    return [f"would {step}" for step in steps] if dry_run else steps


@contextlib.contextmanager
def _told_as_install_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InstallError(f"{error.filename}: {error.strerror}") from error
