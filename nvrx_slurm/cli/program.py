"""What the user wants to run, checked as far as this host can tell."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from nvrx_slurm.wire.messages import ProgramKind


def check_text(ctx: click.Context) -> None:
    """Refuse what is no UTF-8 in options, variables for them, arguments and the working directory.

    It can't be told to agents, nor stand in the journal.
    """
    for name, value in {**ctx.params, "working directory": os.getcwd()}.items():
        for text in _texts(value):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"{name}: {text!a} is not UTF-8, which is needed") from None


def _texts(value: object) -> Iterable[str]:
    match value:
        case str() | Path():
            yield str(value)
        case tuple() | list():
            for part in value:
                yield from _texts(part)
        case _:
            pass


def find_program(script: str, module: bool, no_python: bool) -> tuple[ProgramKind, str]:
    """Return what to run, checked as far as this host can tell."""
    if module and no_python:
        raise click.UsageError("--module and --no-python exclude each other")
    if module:
        return ProgramKind.MODULE, script
    if no_python:
        found = shutil.which(script)
        if found is None:
            raise click.BadParameter(f"{script} is not an executable", param_hint="SCRIPT")
        return ProgramKind.EXECUTABLE, str(Path(found).absolute())
    if not Path(script).is_file():
        raise click.BadParameter(f"{script} is not a file", param_hint="SCRIPT")
    return ProgramKind.SCRIPT, str(Path(script).absolute())


def check_module(name: str) -> None:
    """Refuse what ``python -m`` would not find here; nothing of it is imported."""
    top = name.partition(".")[0]
    # Since Python 3.11: PYTHONSAFEPATH.
    here = [] if getattr(sys.flags, "safe_path", False) else [os.getcwd()]
    saved = sys.path
    sys.path = [*here, *saved]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path = saved
    if found is None:
        raise click.BadParameter(
            f"{sys.executable} finds no module {name} in {os.getcwd()}, PYTHONPATH or its site-packages",
            param_hint="SCRIPT",
        )


def check_nproc(nproc_per_node: str) -> None:
    """Refuse what is neither a possible number of ranks nor a word for one."""
    # 250: what one message to the worker server can carry in descriptors (SCM_MAX_FD is 253).
    number = nproc_per_node.isascii() and nproc_per_node.isdigit() and len(nproc_per_node) < 4
    if nproc_per_node in ("auto", "gpu", "cpu") or (number and 0 < int(nproc_per_node) <= 250):
        return
    raise click.BadParameter(
        f"{nproc_per_node[:40]!r}: a number from 1 to 250, auto, gpu or cpu is accepted",
        param_hint="--nproc-per-node",
    )
