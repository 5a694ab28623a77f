"""What the documents show can be typed."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

CLONE = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [CLONE / "README.md", *sorted((CLONE / "docs").glob("*.md"))]
_COMMAND = re.compile(r"nvrx-(srun|report|devcluster|doctor|quickstart)\b[^`\n|…]*")


def _shown() -> list[tuple[str, str]]:
    """Every command line of ours in a code span or block, with its document."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.S)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
        for line in lines:
            match = _COMMAND.search(line)
            if match and not line.lstrip().startswith("#"):
                found.append((document.name, match.group(0).strip()))
    return found


def _options(command: click.Command) -> set[str]:
    return {o for p in command.params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize(("document", "line"), _shown(), ids=lambda value: str(value)[:60])
def test_every_option_that_a_document_shows_exists(document: str, line: str) -> None:
    words = shlex.split(line.split("#")[0], posix=True)
    command = importlib.import_module(f"nvrx_slurm.cli.{words[0].removeprefix('nvrx-')}").main
    rest = words[1:]
    known = _options(command) | {"-h", "--help"}
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{document}: {line}"
        known |= _options(command.commands[rest[0]])
        rest = rest[1:]
    for word in rest:
        if word == "--" or word.endswith(".py"):
            break
        if word.startswith("-"):
            assert word.split("=")[0] in known, f"{document}: {line}: {word}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"
