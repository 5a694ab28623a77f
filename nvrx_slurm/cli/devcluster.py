"""nvrx-devcluster: a real Slurm cluster on one machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from nvrx_slurm.devcluster import ClusterStatus, DevCluster, DevClusterError, Link, NodeStatus, Power
from nvrx_slurm.devcluster.hardware import Shape

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Refused(click.ClickException):
    exit_code = 2


def _one_sentence(function: _Function) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DevClusterError as error:
            raise _Refused(str(error)) from error

    return wrapped


_name = click.option("--name", default="dev", show_default=True, help="Which cluster, of several.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run a real Slurm cluster on this machine.

    munged, slurmctld and one slurmd per node run for real; every node has its own network address, host name,
    process ids, /tmp, /dev/shm and local disk (/local), so that losing one is a real node loss. All other
    files are shared with this machine.
    """


@main.command()
@click.option("--nodes", default=4, show_default=True, help="How many nodes: n1, n2, …")
@click.option(
    "--gpus-per-node",
    type=int,
    help="GPUs that Slurm hands out.  [default: 2; with --hardware 8]",
)
@click.option(
    "--hardware",
    is_flag=True,
    help="Simulate GPUs with 18 NVLinks each, network adapters, kernel log and storage: see inject.",
)
@click.option("--nics", type=int, help="Network adapters of the simulated hardware.  [default: 9]")
@click.option(
    "--share",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="A directory below /tmp that the nodes shall see; each has its own /tmp otherwise.",
)
@click.option(
    "--slurm-conf",
    metavar="LINE",
    multiple=True,
    help="A line for the end of slurm.conf, as nvrx-health install-hooks prints them; may be repeated.",
)
@_name
@_one_sentence
def up(
    nodes: int,
    gpus_per_node: int | None,
    hardware: bool,
    nics: int | None,
    share: tuple[str, ...],
    slurm_conf: tuple[str, ...],
    name: str,
) -> None:
    """Start the cluster and wait until every node is idle; use it again if it is up."""
    if nics is not None and not hardware:
        raise DevClusterError("--nics is for simulated hardware: add --hardware")
    began = time.monotonic()
    cluster = DevCluster(name)
    usual = Shape() if hardware else None
    if gpus_per_node is None:
        gpus_per_node = usual.gpus if usual else 2
    cluster.up(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        share=share,
        slurm_conf=slurm_conf,
        nics=usual.nics if usual and nics is None else nics,
    )
    option = "" if name == "dev" else f" --name {name}"
    click.echo(
        f"cluster {name!r} is up: {nodes} nodes with {gpus_per_node} GPUs each "
        f"({time.monotonic() - began:.1f} s)\n"
        f'to use it from this shell: eval "$(nvrx-devcluster env{option})"'
    )


@main.command()
@_name
@_one_sentence
def down(name: str) -> None:
    """Stop the cluster and remove every trace of it."""
    was_there = DevCluster(name).down()
    click.echo(f"cluster {name!r} is down" if was_there else f"cluster {name!r} was not up")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@_name
@_one_sentence
def status(as_json: bool, name: str) -> None:
    """Show the nodes: power, network, slurmd, and what Slurm thinks of them."""
    found = DevCluster(name).status()
    if as_json:
        document = dataclasses.asdict(found) if found else {"name": name, "phase": "down", "nodes": []}
        click.echo(json.dumps(document, default=str, indent=2))
    elif found is None:
        click.echo(f"cluster {name!r} is not up")
    else:
        _print_status(found)


@main.command()
@_name
@_one_sentence
def env(name: str) -> None:
    """Print the shell command that makes Slurm's commands talk to this cluster."""
    for variable, value in DevCluster(name).environment().items():
        click.echo(f"export {variable}={shlex.quote(value)}")


@main.command("kill-node")
@click.argument("node")
@_name
@_one_sentence
def kill_node(node: str, name: str) -> None:
    """Cut a node's power: its processes are gone, its peers hear nothing."""
    DevCluster(name).kill_node(node)


@main.command("restore-node")
@click.argument("node")
@click.option("--wipe-local", is_flag=True, help="The killed node comes back with an empty local disk.")
@click.option("--unnoticed", is_flag=True, help="The killed node is back before Slurm has missed it.")
@_name
@_one_sentence
def restore_node(node: str, wipe_local: bool, unnoticed: bool, name: str) -> None:
    """Boot a killed node, or plug in a partitioned one, and return it to service."""
    DevCluster(name).restore_node(node, wipe_local=wipe_local, unnoticed=unnoticed)


@main.command("partition-node")
@click.argument("node")
@_name
@_one_sentence
def partition_node(node: str, name: str) -> None:
    """Cut a node's network; its processes go on."""
    DevCluster(name).partition_node(node)


@main.command()
@click.argument("node")
@click.argument("faults", nargs=-1, required=True, metavar="FAULT…")
@_name
@_one_sentence
def inject(node: str, faults: tuple[str, ...], name: str) -> None:
    """Break simulated hardware of a node: gpu.3.xid=79, nvlink.0.4=down, nic.mlx5_1.link_downed+=1 …

    What can be broken is in docs/devcluster.md, and in the answer to a fault that there is not.
    """
    DevCluster(name).inject(node, faults)


@main.command()
@click.argument("node")
@_name
@_one_sentence
def heal(node: str, name: str) -> None:
    """Mend all simulated hardware of a node."""
    DevCluster(name).heal(node)


@main.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_name
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
@_one_sentence
def exec_(ctx: click.Context, name: str, node: str, command: tuple[str, ...]) -> None:
    """Run a command inside a node; its exit code is passed on."""
    argv = command[1:] if command[0] == "--" else command
    if not argv:
        raise click.UsageError("no command given: nvrx-devcluster exec NODE -- COMMAND…")
    code = DevCluster(name).exec(node, argv).returncode
    ctx.exit(code if code >= 0 else 128 - code)


def _print_status(status: ClusterStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"cluster {status.name!r} is {status.phase.value}: {len(status.nodes)} nodes with "
        f"{status.gpus_per_node} GPUs each on {status.subnet}, controller "
        f"{'running' if status.controller else 'not running'}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("node", "address", "power", "network", "slurmd", "slurm", "reason"):
        table.add_column(column, overflow="fold")
    for node in status.nodes:
        table.add_row(*_cells(node))
    console.print(table)
    console.print(f"SLURM_CONF={os.fspath(status.slurm_conf)}", soft_wrap=True)


def _cells(node: NodeStatus) -> tuple[str, ...]:
    return (
        node.name,
        node.address,
        node.power.value if node.power is Power.ON else f"[red]{node.power.value}[/red]",
        node.link.value if node.link is Link.UP else f"[red]{node.link.value}[/red]",
        "running" if node.slurmd else "[red]not running[/red]",
        node.slurm_state or "could not be asked",
        node.reason,
    )
