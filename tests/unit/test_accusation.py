"""Accusations in a job's Comment: what others keep there stays, what a user writes there is not trusted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.slurm.accusation import MOST_NODES, Accusation, parse_accusation, with_accusation

NODES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
ACCUSATIONS = st.builds(
    Accusation,
    run=st.integers(0, 1000),
    bad=st.dictionaries(NODES, st.text(max_size=100), max_size=20),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
OTHERS = st.dictionaries(st.text(max_size=9).filter(lambda key: key != "nvrx"), JSON, max_size=4)


def _is_plain(text: str) -> bool:
    return not text.lstrip().startswith("{") and "nvrx{" not in text


@given(ACCUSATIONS)
def test_an_accusation_in_an_empty_comment_is_read_back(accusation: Accusation) -> None:
    read = parse_accusation(with_accusation("", accusation))
    assert read.run == accusation.run
    assert list(read.bad) == list(accusation.bad)[: len(read.bad)]
    cut = len(accusation.words()) > 700 or len(read.bad) == MOST_NODES
    assert cut or len(read.bad) == len(accusation.bad)


@given(OTHERS, ACCUSATIONS, ACCUSATIONS)
def test_the_keys_of_others_stay(others: dict[str, object], first: Accusation, second: Accusation) -> None:
    comment = with_accusation(with_accusation(json.dumps(others), first), second)
    document = json.loads(comment)
    assert {key: document[key] for key in others} == others
    assert parse_accusation(comment).run == second.run
    assert comment.count('"nvrx"') >= 1


@given(st.text(max_size=200).filter(_is_plain), ACCUSATIONS, ACCUSATIONS)
def test_the_text_of_others_stays(text: str, first: Accusation, second: Accusation) -> None:
    comment = with_accusation(with_accusation(text, first), second)
    assert text.strip() == "" or comment.startswith(text.rstrip())
    assert comment.count("nvrx{") <= 1
    assert parse_accusation(comment) == parse_accusation(with_accusation("", second))


@pytest.mark.parametrize("why", ["x" * 500, "'\\" * 40, "ü" * 80, ""])
def test_ours_is_never_longer_than_a_kibibyte(why: str) -> None:
    words = Accusation(0, {f"node-with-a-long-name-{n}": why for n in range(1000)}).words()
    assert len(words) <= 1024
    assert "node-with-a-long-name-0" in parse_accusation(f"nvrx{words}").bad


@given(st.text(max_size=2000) | JSON.map(json.dumps) | JSON.map(lambda value: json.dumps({"nvrx": value})))
def test_no_comment_is_too_strange(comment: str) -> None:
    read = parse_accusation(comment)
    assert all(isinstance(why, str) and why.isprintable() for why in read.bad.values())


@pytest.mark.parametrize(
    "comment",
    [
        '{"nvrx":{"v":2,"run":0,"bad":{"n1":"x"}}}',
        '{"nvrx":{"v":1,"run":0,"bad":{"n1":"x"},"more":1}}',
        '{"nvrx":{"v":1,"run":-1,"bad":{"n1":"x"}}}',
        '{"nvrx":{"v":1,"run":0,"bad":{"n1; reboot":"x"}}}',
        '{"nvrx":{"v":1,"run":0,"bad":{"../n1":"x"}}}',
        '{"nvrx":{"v":1,"run":0,"bad":{"n1":"two\\nlines"}}}',
        '{"nvrx":{"v":1,"run":0,"bad":{"n1":"\\u001b[31mred"}}}',
        '{"nvrx":{"v":1,"run":0,"bad":{"n1":1}}}',
        '{"nvrx":{"v":1,"run":0,"bad":["n1"]}}',
        '{"nvrx":"n1"}',
        '{"nvrx":{"v":1,"run":0,"bad":' + json.dumps({f"n{n}": "x" for n in range(17)}) + "}}",
        'nvrx{"v":1,"run":0,"bad":{"n1":"x"}} and something behind it',
        "{" * 100_000,
        "[" * 60_000,
        '{"a":' * 10_000,
        'nvrx{"v":1,"run":0,"bad":{"n1":"' + "x" * 70_000 + '"}}',
    ],
)
def test_what_is_not_exactly_an_accusation_accuses_nobody(comment: str) -> None:
    assert parse_accusation(comment) == Accusation()
