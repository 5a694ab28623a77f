"""What ``nvrx-health`` does for Slurm: hooks, their installation, and the nodes that they have drained."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.health_parts import Refused, config_option, configured, make_node, state_option
from nvrx_slurm.cli.parameters import Duration

if TYPE_CHECKING:
    from nvrx_slurm.health.config import HealthConfig
    from nvrx_slurm.slurm.administration import ScontrolAdmin

_MOST_NOTES = 256 * 1024
_DEFAULT_PREFIX = Path("/etc/nvrx")
_prefix_option = click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    default=_DEFAULT_PREFIX,
    show_default=True,
    help="Where the hooks, their configuration and the site's own checks are.",
)
_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")


@click.command()
@click.argument("stage", type=click.Choice(("prolog", "epilog", "periodic")))
@click.option(
    "--limit", type=Duration(), default="30s", show_default=True, help="Who runs this ends it then."
)
@config_option
@state_option
def hook(stage: str, limit: float, config_path: Path | None, state_dir: Path | None) -> int:
    """What slurmd's hooks run: look at this node, drain it for what has failed, clean up after a job.

    The job's Comment and Extra are read from standard input, with a NUL between them. Exit codes: 0 go on; 17
    the node has failed and is drained; everything else: this is broken, and the hook passes.
    """
    from nvrx_slurm.health.stage import Stage
    from nvrx_slurm.hooks.context import ContextError, HookContext
    from nvrx_slurm.hooks.hook import Hook

    # slurmd's may be anything, and so would be who can write the directories that are made.
    os.umask(0o077)
    checks, config = configured(config_path)
    notes = "" if sys.stdin.isatty() else sys.stdin.buffer.read(_MOST_NOTES).decode(errors="replace")
    try:
        context = HookContext.from_environ(os.environ, notes, Stage(stage))
    except ContextError as error:
        raise Refused(str(error)) from error
    node = make_node(stage, config, state_dir, context.job)
    return Hook(context, node, checks, config, _admin(config), _say, limit).run().value


def _say(text: str) -> None:
    """Write one line of the log, whatever users call their files and processes.

    A disk that is full must not end a hook: unbuffered, nothing is left to fail when the interpreter ends.
    """
    from nvrx_slurm.health.text import printable

    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text)}\n".encode())


def _admin(config: HealthConfig) -> ScontrolAdmin:
    from nvrx_slurm.slurm.administration import ScontrolAdmin

    environ = dict(os.environ)
    if config.hooks.slurm_conf:
        environ.setdefault("SLURM_CONF", config.hooks.slurm_conf)
    if config.hooks.slurm_bin:
        environ["PATH"] = f"{config.hooks.slurm_bin}:{environ.get('PATH', os.defpath)}"
    return ScontrolAdmin(environ)


@click.command("install-hooks")
@_prefix_option
@click.option(
    "--limit", type=Duration(), default="30s", show_default=True, help="A prolog that takes longer is ended."
)
@_dry_run
def install_hooks(prefix: Path, limit: float, dry_run: bool) -> None:
    """Write the hooks and a configuration, and print the lines for slurm.conf.

    What is there already and was changed stays, except the hooks themselves. Twice is fine.
    """
    from nvrx_slurm.hooks.install import InstallError, install, slurm_conf_lines

    try:
        done = install(prefix, Path(sys.argv[0]), int(limit), dry_run=dry_run)
    except InstallError as error:
        raise Refused(str(error)) from error
    for step in done:
        click.echo(step, err=True)
    click.echo("\n".join(slurm_conf_lines(prefix, int(limit))))
    click.echo(
        "these lines belong into slurm.conf, joined with what it has there; then: scontrol reconfigure\n"
        "this node is done; every other one needs the same: run this there, or share the directory",
        err=True,
    )


@click.command("uninstall-hooks")
@_prefix_option
@_dry_run
def uninstall_hooks(prefix: Path, dry_run: bool) -> None:
    """Remove what install-hooks has written; a changed configuration and the site's own checks stay."""
    from nvrx_slurm.hooks.install import InstallError, uninstall

    try:
        done = uninstall(prefix, dry_run=dry_run)
    except InstallError as error:
        raise Refused(str(error)) from error
    click.echo("\n".join(done) or f"nothing of ours in {prefix}")
    click.echo("slurm.conf: take out the lines with this directory, then scontrol reconfigure", err=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (nvrx.nodes.v1).")
@config_option
def nodes(as_json: bool, config_path: Path | None) -> None:
    """List the nodes that get no jobs: drained, down, or left out by jobs; why, by whom, since when."""
    from nvrx_slurm.hooks.nodes import as_document, lines, out_of_service, table
    from nvrx_slurm.slurm.client import SlurmUnavailableError

    _, config = configured(config_path)
    admin = _admin(config)
    try:
        found = out_of_service(admin.node_records(), admin.excluding_jobs())
    except SlurmUnavailableError as error:
        raise Refused(f"Slurm could not be asked: {error}") from error
    if as_json:
        click.echo(as_document(found), nl=False)
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(table(found))
    else:
        click.echo("\n".join(lines(found)))


@click.command()
@click.argument("name", metavar="NODE")
@click.option(
    "--repaired",
    is_flag=True,
    help="What was counted, logged or missing before has been dealt with: take a new baseline first.",
)
@click.option(
    "--via",
    default="ssh -o BatchMode=yes",
    show_default=True,
    help="What runs a command on another node; the node and the command are added.",
)
@click.option("--here", is_flag=True, help="This is NODE, whatever its host name.")
@config_option
@state_option
def resume(
    name: str, repaired: bool, via: str, here: bool, config_path: Path | None, state_dir: Path | None
) -> int:
    """Look at NODE again, and return it to service if nothing fails. Only nodes that we have drained.

    The checks run on the node: as root there, or from anywhere through --via.
    """
    from nvrx_slurm.hooks.resume import RefusedError, Resumption, elsewhere

    checks, config = configured(config_path)
    node = make_node("manual", config, state_dir)
    resumption = Resumption(name, _admin(config), node, checks, config, click.echo)
    try:
        resumption.require_ours()
        if name != node.host and not here:
            command = [str(Path(sys.argv[0]).absolute()), "resume", name, "--here"]
            for option, path in (("--config", config_path), ("--state-dir", state_dir)):
                command += [option, str(path.absolute())] if path else []
            return elsewhere(via, name, [*command, *(["--repaired"] if repaired else [])])
        resumption.run(repaired=repaired)
    except RefusedError as error:
        raise Refused(str(error)) from error
    return 0
