"""``nvrx-ckpt``: what checkpoints there are, whether they are whole, what is in them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from nvrx_slurm.checkpointing.contents import Entry
    from nvrx_slurm.checkpointing.inspection import Checkpoint

_PIPED_WIDTH = 200
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_WHERE = click.argument("where", metavar="DIR", type=click.Path(exists=True, path_type=Path))


class _PathOrUrl(click.Path):
    """A path that exists, or a URL for fsspec, as text."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from nvrx_slurm.checkpointing.storage.objects import is_url

        return value if is_url(value) else super().convert(value, param, ctx)


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_ANYWHERE = click.argument("where", metavar="DIR|URL", type=_PathOrUrl(exists=True, path_type=Path))


@click.group(context_settings=_SETTINGS)
def main() -> None:
    """Look at checkpoints: files of torch.save, directories of torch.distributed.checkpoint, local parts."""


@main.command("ls")
@_ANYWHERE
@_JSON
def list_(where: Path | str, as_json: bool) -> None:
    """List the checkpoints in DIR, or at a URL as s3://bucket/run, oldest first; their bits are not read."""
    from nvrx_slurm.checkpointing.inspection import find

    _show(where, _asked(find, where), as_json)


@main.command()
@_ANYWHERE
@_JSON
def verify(where: Path | str, as_json: bool) -> None:
    """Read the checkpoints in DIR, or at a URL, and compare every bit with its checksum.

    Exits 1 if one is damaged or torn. Of those that another writer made without checksums only the
    structure of a file can be checked; that is said, and is no failure.
    """
    from nvrx_slurm.checkpointing.inspection import State
    from nvrx_slurm.checkpointing.inspection import verify as verified

    there = _find(where)
    with _bytes_read(sum(each.size for each in there), quiet=as_json) as read:
        found = [verified(each, read) for each in there]
    _show(where, found, as_json)
    sys.exit(1 if any(each.state in (State.DAMAGED, State.TORN) for each in found) else 0)


@main.command()
@_WHERE
@_JSON
def inspect(where: Path, as_json: bool) -> None:
    """Show the tensors in the checkpoint DIR, a file or a directory, without loading them."""
    import pickle

    from nvrx_slurm.checkpointing.contents import entries
    from nvrx_slurm.checkpointing.local.errors import CheckpointingException
    from nvrx_slurm.checkpointing.storage import CorruptCheckpointError

    try:
        found = entries(Path(_the_one(where).path))
    except (
        *(CorruptCheckpointError, CheckpointingException),
        *(OSError, RuntimeError, pickle.UnpicklingError),
    ) as error:
        raise click.ClickException(f"{where}: {str(error).splitlines()[0]}") from None
    if as_json:
        _print({"schema": "nvrx.ckpt.inspect.v1", "path": str(where), "entries": [asdict(e) for e in found]})
    else:
        _print_entries(found)


@main.command()
@_WHERE
@_JSON
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many of the newest to keep.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def prune(where: Path, as_json: bool, keep: int, dry_run: bool) -> None:
    """Remove old checkpoints in DIR, and files that killed writers have left.

    The newest committed ones are kept; those whose sizes show damage do not count among them. A directory
    without .metadata may be one that is being written: it stays unless a newer one has been committed.
    """
    from nvrx_slurm.checkpointing.inspection import State, remove, torn_files

    found = _find(where)
    if [each.path for each in found] == [where]:
        raise click.ClickException(f"{where} is a checkpoint: give the directory that it is in")
    good = [each for each in found if each.state is State.COMMITTED]
    kept = {each.path for each in good[-keep:]}
    newest = max((each.modified for each in good), default=float("-inf"))
    old = [each for each in found if each.path not in kept and each.modified <= newest]
    torn = torn_files(where)
    if not dry_run:
        try:
            old = [each for each in old if remove(each)]
            for path in torn:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise click.ClickException(f"{error.filename or where}: {error.strerror or error}") from None
    gone = [*(Path(each.path) for each in old), *torn]
    if as_json:
        _print({"schema": "nvrx.ckpt.prune.v1", "removed": list(map(str, gone)), "dry_run": dry_run})
    else:
        for path in gone:
            click.echo(f"{'would remove' if dry_run else 'removed'} {path}")


def _asked(find: Any, where: Path | str) -> list[Checkpoint]:
    try:
        return list(find(where))
    except OSError as error:
        raise click.ClickException(f"{error.filename or where}: {error.strerror or error}") from None


def _find(where: Path | str) -> list[Checkpoint]:
    from nvrx_slurm.checkpointing.inspection import find

    return _asked(find, where)


def _the_one(where: Path) -> Checkpoint:
    found = _find(where)
    if [each.path for each in found] != [where]:
        raise click.ClickException(f"{where} is no checkpoint; it holds {len(found)}: name one")
    return found[0]


@contextlib.contextmanager
def _bytes_read(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yield what takes the bytes that have been read; shows a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = ("verifying", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    is_hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=is_hidden, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def _show(where: Path | str, found: list[Checkpoint], as_json: bool) -> None:
    if as_json:
        _print({"schema": "nvrx.ckpt.ls.v1", "path": str(where), "checkpoints": list(map(_document, found))})
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from nvrx_slurm.checkpointing.inspection import State

    colours = {State.INTACT: "green", State.DAMAGED: "red", State.TORN: "yellow"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("checkpoint", "kind", "state", "size", "committed", ""):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=name != "")
    for each in found:
        when = datetime.fromtimestamp(each.modified).strftime("%Y-%m-%d %H:%M:%S")
        state = Text(each.state.value, style=colours.get(each.state, ""))
        table.add_row(Text(each.name), each.kind.value, state, _size(each.size), when, Text(each.why))
    console = _console()
    if found:
        console.print(table)
    else:
        click.echo(f"no checkpoints in {where}")


def _console() -> Console:
    """As wide as the terminal; wide where the output is read by a program."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind.value,
        "state": checkpoint.state.value,
        "size": checkpoint.size,
        "modified": checkpoint.modified,
        "why": checkpoint.why,
        "files": list(map(str, checkpoint.local.files)) if checkpoint.local else None,
    }


def _print_entries(found: list[Entry]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("name", "type", "shape", "size"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for each in found:
        shape = "" if each.shape is None else " x ".join(map(str, each.shape)) or "scalar"
        table.add_row(Text(each.name), each.type, shape, _size(each.size) if each.shape is not None else "")
    console = _console()
    console.print(table)
    console.print(f"{len(found)} entries, {_size(sum(each.size for each in found))}")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _print(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value))
