"""``nvrx-ckpt``: what checkpoints there are, whether they are whole, what is in them."""

from __future__ import annotations

import contextlib
import errno
import io
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
_LOOKED_INTO = 100
_NAMED = 3
_SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Main(click.Group):
    """Its commands write whatever a name has, wherever they write to, and say in a sentence what fails."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever reads has seen enough: click ends quietly
            raise click.ClickException(_text_of(error, "standard output")) from None


class _PathOrUrl(click.Path):
    """A path that exists, or a URL for fsspec, as text."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from nvrx_slurm.checkpointing.storage.objects import is_url

        if isinstance(value, str):
            value = value.removeprefix("file://")  # what is known of directories here is known there, too
        return value if is_url(value) else super().convert(value, param, ctx)


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_WHERE = click.argument("where", metavar="DIR|URL", type=_PathOrUrl(exists=True, path_type=Path))


@click.group(cls=_Main, context_settings=_SETTINGS)
def main() -> None:
    """Look at checkpoints: files of torch.save, directories of torch.distributed.checkpoint, local parts."""


@main.command("ls")
@_WHERE
@_JSON
def list_(where: Path | str, as_json: bool) -> None:
    """List the checkpoints in DIR, or at a URL as s3://bucket/run, oldest first; their bits are not read."""
    _show(where, _find(where), as_json)


@main.command()
@_WHERE
@_JSON
def verify(where: Path | str, as_json: bool) -> None:
    """Read the checkpoints in DIR, or at a URL, and compare every bit with its checksum.

    Exits 1 if one is damaged, torn, or can't be read. Of those that another writer made without checksums
    only the structure of a file can be checked; that is said, and is no failure.
    """
    from nvrx_slurm.checkpointing.inspection import State
    from nvrx_slurm.checkpointing.inspection import verify as verified

    there = _find(where)
    with _bytes_read(sum(each.size for each in there), quiet=as_json) as read, _at(where):
        found = [verified(each, read) for each in there]
    _show(where, found, as_json)
    good = (State.INTACT, State.NO_CHECKSUMS)
    sys.exit(0 if all(each.state in good for each in found) else 1)


@main.command()
@_WHERE
@_JSON
def inspect(where: Path | str, as_json: bool) -> None:
    """Show the tensors in one checkpoint, a file, a directory or one at a URL, without loading them."""
    import pickle

    from nvrx_slurm.checkpointing.contents import entries
    from nvrx_slurm.checkpointing.local.errors import CheckpointingException
    from nvrx_slurm.checkpointing.storage import CorruptCheckpointError

    checkpoint = _the_one(where)
    try:
        with _at(where):
            found = entries(checkpoint.path)
    except (CorruptCheckpointError, CheckpointingException, RuntimeError, pickle.UnpicklingError) as error:
        text = str(error) if isinstance(error, CorruptCheckpointError) else f"{where}: {error}"
        raise click.ClickException(_printable(text.splitlines()[0])) from None
    if as_json:
        _print({"schema": "nvrx.ckpt.inspect.v1", "path": str(where), "entries": [asdict(e) for e in found]})
    else:
        _print_entries(found)


@main.command()
@_WHERE
@_JSON
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many of the newest to keep.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def prune(where: Path | str, as_json: bool, keep: int, dry_run: bool) -> None:
    """Remove old checkpoints in DIR, or at a URL, and files that killed writers have left.

    The newest committed ones are kept; those that are not whole, as far as sizes and structure show, do not
    count among them. Checkpoints whose names differ in numbers alone are a series, of which the ones with
    the highest step are the newest; those without a number are ordered by time. A directory without
    .metadata may be one that is being written: it stays unless a newer one has been committed. Exits 1 if
    something could not be removed.
    """
    from nvrx_slurm.checkpointing.inspection import is_whole, remove, torn_files
    from nvrx_slurm.checkpointing.retention import superfluous

    found = _find(where)
    if [str(each.path) for each in found] == [_same_form(where)]:
        raise click.ClickException(_printable(f"{where} is a checkpoint: give the directory that it is in"))
    gone: list[Path | str] = []
    failed: dict[str, str] = {}
    with _at(where):
        old = superfluous(found, keep, is_whole)
        torn = torn_files(where) if isinstance(where, Path) else []
    for each in old:
        try:
            with _at(each.path):
                if remove(each, dry_run=dry_run):
                    gone += each.local.files if each.local else [each.path]
        except click.ClickException as error:
            failed[str(each.path)] = error.message
    for path in torn:
        try:
            if not dry_run:
                path.unlink(missing_ok=True)
            gone.append(path)
        except OSError as error:
            failed[str(path)] = _text_of(error, path)
    if as_json:
        document = {"removed": list(map(str, gone)), "failed": failed, "dry_run": dry_run}
        _print({"schema": "nvrx.ckpt.prune.v1", **document})
    else:
        for one in gone:
            click.echo(f"{'would remove' if dry_run else 'removed'} {_printable(one)}")
        for why in failed.values():
            click.echo(f"Error: {why}", err=True)
    sys.exit(1 if failed else 0)


def _find(where: Path | str) -> list[Checkpoint]:
    from nvrx_slurm.checkpointing.inspection import find

    with _at(where):
        return find(where)


@contextlib.contextmanager
def _at(where: Path | str) -> Iterator[None]:
    """Say in a sentence what can't be read or removed there."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(_text_of(error, where)) from None
    except Exception as error:
        if isinstance(where, Path):
            raise
        first = (str(error).splitlines() or [""])[0]  # a store's client raises what it likes
        raise click.ClickException(_printable(f"{where}: {type(error).__name__}: {first}")) from None


def _text_of(error: OSError, where: Path | str) -> str:
    return _printable(f"{error.filename or where}: {error.strerror or error}")


def _printable(text: object) -> str:
    """Control characters in names would take the terminal along; they are shown as Python writes them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def _same_form(where: Path | str) -> str:
    return where.rstrip("/") if isinstance(where, str) else str(where)


def _the_one(where: Path | str) -> Checkpoint:
    found = _find(where)
    if [str(each.path) for each in found] != [_same_form(where)]:
        raise click.ClickException(_printable(f"{where} is no checkpoint; it holds {len(found)}: name one"))
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

    red = (State.DAMAGED, State.UNREADABLE)
    colours = {State.INTACT: "green", State.TORN: "yellow", **dict.fromkeys(red, "red")}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("checkpoint", "kind", "state", "size", "committed", ""):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=name != "")
    for each in found:
        when = datetime.fromtimestamp(each.modified).strftime("%Y-%m-%d %H:%M:%S")
        state = Text(each.state.value, style=colours.get(each.state, ""))
        label, why = Text(_printable(each.name)), Text(_printable(each.why.removeprefix(f"{each.path}: ")))
        table.add_row(label, each.kind.value, state, _size(each.size), when, why)
    console = _console()
    if found:
        console.print(table)
    else:
        below = [_printable(path) for path in _holders_below(where)]
        but = f", but in {', '.join(below)}" if below else ""
        click.echo(f"no checkpoints in {_printable(where)}{but}")


def _holders_below(where: Path | str) -> list[Path]:
    """Return some directories in this one that hold checkpoints: a run's, or a session's of local ones."""
    if not isinstance(where, Path) or not where.is_dir():
        return []
    with contextlib.suppress(OSError, click.ClickException):
        folders = sorted(path for path in where.iterdir() if path.is_dir())[:_LOOKED_INTO]
        return [path for path in folders if _find(path)][:_NAMED]
    return []


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
        table.add_row(
            Text(_printable(each.name)), each.type, shape, _size(each.size) if each.shape is not None else ""
        )
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
