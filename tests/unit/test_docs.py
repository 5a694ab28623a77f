"""What the documents show can be typed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from test_launch_cli import FT_LAUNCHER

from nvrx_slurm.cli.doctor import _launcher, _own_times
from nvrx_slurm.cli.doctor import main as doctor
from nvrx_slurm.cli.launch import main as launch
from nvrx_slurm.cli.launch_flags import FOREIGN_FLAGS
from nvrx_slurm.cli.report_stragglers import stragglers
from nvrx_slurm.doctor.batch_file import parse_batch_file
from nvrx_slurm.doctor.lint import lint
from nvrx_slurm.fault_tolerance.config import NOT_NEEDED, NOT_OFFERED
from nvrx_slurm.launch.rendezvous import keys_without_effect

CLONE = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [CLONE / "README.md", *sorted((CLONE / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
_SHELL = ("sh", "bash", "console")
_COMMAND = re.compile(
    r"nvrx-(srun|launch|report|devcluster|doctor|health|quickstart|attribute|ckpt)\b[^`\n|…)]*"
)


def _shown() -> list[tuple[str, str]]:
    """Every command line of ours in a code span or block, with its document."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        blocks = [block for language, block in _FENCED.findall(text) if language in _SHELL]
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
    if rest[:1] == ["stragglers"]:
        command, rest = stragglers, rest[1:]
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


def _blocks(language: str, begins: str) -> list[str]:
    fenced = [pair for path in DOCUMENTS for pair in _FENCED.findall(path.read_text())]
    return [
        block for said, block in fenced if said in ("", *language.split("|")) and block.startswith(begins)
    ]


def test_the_doctor_has_nothing_to_say_about_a_batch_script_in_a_document() -> None:
    scripts = _blocks("sh|bash", "#!/bin/bash")
    assert scripts
    for script in scripts:
        found, ladders = lint(parse_batch_file(script, _launcher()), _own_times(), None)
        assert found == []
        assert ladders


def test_the_doctor_has_nothing_to_say_about_a_configuration_in_a_document(tmp_path: Path) -> None:
    configurations = _blocks("yaml", "fault_tolerance:")
    assert configurations
    for text in configurations:
        (tmp_path / "ft.yaml").write_text(text)
        options = ["check", "--json", "--longest-step", "1m", "--time-limit", "1d", "--ft-config"]
        done = CliRunner().invoke(doctor, [*options, str(tmp_path / "ft.yaml")])
        ladder = [
            f for f in json.loads(done.output)["findings"] if f["rule"] in ("T1", "T2", "T3", "T4", "T5")
        ]
        assert {finding["status"] for finding in ladder} == {"ok"}, ladder


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def _launch_page() -> str:
    return (CLONE / "docs" / "launch.md").read_text()


def test_the_page_of_the_launcher_tells_of_every_foreign_option_what_the_launcher_does() -> None:
    page = _launch_page().splitlines()
    assert [row for row in page if row in {flag.row for flag in FOREIGN_FLAGS}] == [
        f.row for f in FOREIGN_FLAGS
    ]
    for key, why in keys_without_effect().items():
        assert f"| `{key}` | no effect: {why} |" in page
    for key, why in NOT_NEEDED.items():
        assert f"| `{key}` | no effect: {why} |" in page
    for key, (why, _) in NOT_OFFERED.items():
        assert any(row.startswith(f"| `{key}` | refused: {why}") for row in page), key


def test_the_page_of_the_launcher_has_every_option_of_torchrun_and_ft_launcher() -> None:
    run = pytest.importorskip("torch.distributed.run")
    torchrun = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    theirs = {name.replace("_", "-") for name in torchrun} - {"-h", "--help"} | set(FT_LAUNCHER)
    rows = {name for row in _launch_page().splitlines() if row.startswith("|") for name in _options_in(row)}
    assert theirs - rows == set()
    assert rows - theirs - _options(launch) == set()


def _options_in(row: str) -> list[str]:
    return re.findall(r"`(--?[a-z][a-z-]*)`", row)
