"""``#SBATCH`` lines, read as sbatch reads them.

What sbatch makes of each line was taken from ``sbatch -vvv --test-only`` of Slurm 22.05.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.slurm.batch_script import (
    BatchScript,
    DirectiveError,
    parse_batch_script,
    split_words,
)


def script(*lines: str) -> BatchScript:
    return parse_batch_script("\n".join(["#!/bin/bash", *lines]) + "\n")


def options(*lines: str) -> list[tuple[str, str | None]]:
    return [(option.name, option.value) for option in script(*lines).options]


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (' --comment={"a":1} -N2 # x y', ["--comment={a:1}", "-N2"]),
        (" --comment='{\"a\": 1}'", ['--comment={"a": 1}']),
        (' --comment "{\\"a\\": 1}"', ["--comment", '{"a": 1}']),
        (' --job-name="a b"c\\ d', ["--job-name=a bc", "d"]),
        (" -J x#y", ["-J", "x"]),
        ("-N2", ["-N2"]),
        (" --job-name=a:b", ["--job-name=a:b"]),
        ("", []),
        ("   # nothing", []),
        ("\t-N\t5 ", ["-N", "5"]),
    ],
)
def test_a_line_is_split_as_sbatch_splits_it(rest: str, words: list[str]) -> None:
    assert [word.text for word in split_words(rest)] == words


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (' --job-name="unclosed', 'a " is not closed'),
        (" --job-name='unclosed", "a ' is not closed"),
        (" -N1 : -N2", "unexpected ':'"),
    ],
)
def test_a_line_that_sbatch_refuses_is_refused(rest: str, message: str) -> None:
    with pytest.raises(DirectiveError, match=message):
        split_words(rest)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("#SBATCH --nodes=5", [("nodes", "5")]),
        ("#SBATCH --nodes 5", [("nodes", "5")]),
        ("#SBATCH -N5", [("nodes", "5")]),
        ("#SBATCH -N 5 --time=10 -J x", [("nodes", "5"), ("time", "10"), ("job-name", "x")]),
        ("#SBATCH-N2", [("nodes", "2")]),
        ("#SBATCH -k", [("no-kill", None)]),
        ("#SBATCH -koff", [("no-kill", "off")]),
        ("#SBATCH --no-kill=off", [("no-kill", "off")]),
        ("#SBATCH -Hc2", [("hold", None), ("cpus-per-task", "2")]),
        ("#SBATCH -c2H", [("cpus-per-task", "2H")]),
        (
            "#SBATCH --sig=B:USR2@100 --requ --no-ki",
            [("signal", "B:USR2@100"), ("requeue", None), ("no-kill", None)],
        ),
        ("#SBATCH --requeue=expedite", [("requeue", "expedite")]),
        ("#SBATCH --exclusive", [("exclusive", None)]),
        ("#SLURM -N1", [("nodes", "1")]),
        ("##SBATCH -N9", []),
        ("  #SBATCH -N9", []),
        ("# SBATCH -N9", []),
    ],
)
def test_options_are_read(line: str, expected: list[tuple[str, str | None]]) -> None:
    assert options(line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("#SBATCH -N2 extra", "'extra' is no option"),
        ('#SBATCH --comment={"a": 1}', "'1}' is no option"),
        ("#SBATCH --nodes", "--nodes needs a value"),
        ("#SBATCH -N", "-N needs a value"),
        ("#SBATCH --hold=yes", "--hold takes no value"),
    ],
)
def test_what_sbatch_refuses_is_noted_with_its_line(line: str, message: str) -> None:
    (trouble,) = script("#SBATCH -J ok", line).refused
    assert (trouble.line, trouble.text) == (3, line)
    assert message in trouble.what


def test_the_last_of_several_counts() -> None:
    found = script("#SBATCH -N2", "#SBATCH --nodes=3").last("nodes")
    assert found is not None
    assert (found.value, found.line) == ("3", 3)


def test_reading_stops_at_the_first_command() -> None:
    read = script("", "# comment", "#SBATCH -J two", "hostname", "#SBATCH -N3")
    assert [option.name for option in read.options] == ["job-name"]
    assert read.body_from == 4
    assert [(trouble.line, trouble.text) for trouble in read.ignored] == [(6, "#SBATCH -N3")]
    assert "after the first command, in line 5" in read.ignored[0].what


def test_lines_that_only_look_like_directives_are_noted() -> None:
    read = script("  #SBATCH -N9", "# SBATCH --time=5", "##SBATCH -N9", "# SBATCH is a word")
    assert [trouble.line for trouble in read.ignored] == [2, 3]


def test_an_unknown_option_is_not_taken_for_a_known_one() -> None:
    read = script("#SBATCH --no-such-option=1", "#SBATCH -Z")
    assert [trouble.what for trouble in read.unknown] == ["--no-such-option", "-Z"]


def test_an_ambiguous_beginning_is_unknown() -> None:
    assert [trouble.what for trouble in script("#SBATCH --no").unknown] == ["--no"]


def test_components_of_a_heterogeneous_job_are_noted() -> None:
    assert [
        trouble.line for trouble in script("#SBATCH -N1", "#SBATCH hetjob", "#SBATCH -N2").components
    ] == [3]


def test_a_hash_within_a_word_is_noted() -> None:
    read = script("#SBATCH -J a#b", "#SBATCH -J a # b", "#SBATCH -J 'a#b'")
    assert [trouble.line for trouble in read.cut] == [2]


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    parse_batch_script(text)
    parse_batch_script("#SBATCH " + text)


@given(st.lists(st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="'\\"), min_size=1)))
def test_words_in_single_quotes_come_back(words: list[str]) -> None:
    assert [word.text for word in split_words(" ".join(f"'{word}'" for word in words))] == words
