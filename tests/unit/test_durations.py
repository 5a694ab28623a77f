"""Durations as people write them, and as options refuse them."""

from __future__ import annotations

import contextlib

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.cli.parameters import Duration
from nvrx_slurm.durations import parse_duration, parse_limit

GOOD = [
    ("90", 90.0),
    ("90s", 90.0),
    ("1.5h", 5400.0),
    ("5m", 300.0),
    ("5min", 300.0),
    (" 5 M ", 300.0),
    ("250ms", 0.25),
    ("2d", 172800.0),
    ("0.5", 0.5),
]
BAD = ["", "m", "-5", "+5", "5x", "1e3", "inf", "nan", "5m3s", "1:30", "5 m s", "0x10", ".5", "9" * 400]


@pytest.mark.parametrize(("text", "seconds"), GOOD)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == parse_limit(text) == seconds


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration; accepted: 90s, 5m, 1.5h$"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0", "0s", "0.0h"])
def test_nothing_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="above 0 is needed"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["none", "None", "null", "off", " NONE "])
def test_a_limit_may_be_none(text: str) -> None:
    assert parse_limit(text) is None
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.text(max_size=10))
def test_any_text_is_a_positive_duration_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_duration(text) > 0


@click.command()
@click.option("--wait", type=Duration(), default="15s")
@click.option("--limit", type=Duration(or_none=True), default=None)
def command(wait: float, limit: float | None) -> None:
    click.echo(f"{wait} {limit}")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "15.0 None\n"),
        (["--wait", "2m", "--limit", "none"], "120.0 None\n"),
        (["--limit=1h"], "15.0 3600.0\n"),
    ],
)
def test_options_take_durations(arguments: list[str], output: str) -> None:
    done = CliRunner().invoke(command, arguments)
    assert (done.exit_code, done.output) == (0, output)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--wait", "soon"], "'soon' is not a duration; accepted: 90s, 5m, 1.5h"),
        (["--wait", "none"], "'none' is not a duration"),
        (["--wait", "0"], "'0': a duration above 0 is needed"),
        (["--limit", "soon"], "accepted: 90s, 5m, 1.5h, none"),
        (["--limit", "0"], "a duration above 0 is needed, or none"),
    ],
)
def test_options_refuse_what_is_none_in_one_sentence(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2
    assert says in done.output
    assert f"'{arguments[0]}'" in done.output
