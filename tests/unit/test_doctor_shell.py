"""The shell commands of a batch script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.doctor.shell import Command, commands


def read(text: str) -> list[Command]:
    return commands(text.splitlines())


def words(text: str) -> list[list[str]]:
    return [list(command.plain) for command in read(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b  c", [["a", "b", "c"]]),
        ("a # it's a comment", [["a"]]),
        ("a#b $# x", [["a#b", "$#", "x"]]),
        ("a \\\n  b", [["a", "b"]]),
        ('a "b c" \'d "e\' f\\ g', [["a", "b c", 'd "e', "f g"]]),
        ('a "it\'s" \\"', [["a", "it's", '"']]),
        ("X=1 Y='2 3' a b", [["a", "b"]]),
        ("X=1", []),
        ("a; b && c || d | e", [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ("a > out 2>&1 b", [["a", "b"]]),
        ("a 2> err < in", [["a"]]),
        ("a &> log", [["a"]]),
        ("if a; then b; fi", [["a"], ["b"]]),
        ("while ! a; do b; done", [["a"], ["b"]]),
        ('a "$(b c)" $(d "e" | f) ${x:-y z}', [["a", "$(b c)", '$(d "e" | f)', "${x:-y z}"]]),
        ("a `b c`", [["a", "`b c`"]]),
        ("cat <<EOF > f\nnvrx-srun x\nEOF\nb", [["cat"], ["b"]]),
        ("python -c 'x\ny' z\nb", [["python", "-c", "x\ny", "z"], ["b"]]),
    ],
)
def test_commands_are_found(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


def test_a_command_knows_its_line_and_what_ends_it() -> None:
    found = read("a \\\n b &\n\nc | d\ne && f")
    assert [(command.line, command.ended_by) for command in found] == [
        (1, "&"),
        (4, "|"),
        (4, ""),
        (5, "&&"),
        (5, ""),
    ]


def test_a_program_is_found_by_its_name_or_any_path() -> None:
    (command,) = read("exec $HOME/bin/nvrx-srun train.py")
    assert command.position_of("nvrx-srun") == 1
    assert command.position_of("srun") is None


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    commands(text.split("\n"))
