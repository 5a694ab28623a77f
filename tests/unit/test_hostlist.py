"""Slurm's compact host lists, both ways."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvrx_slurm.slurm import HostlistError, compress_hostlist, expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("  n1\n", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,7]", ["n1", "n2", "n7"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[001-002],m7", ["n001", "n002", "m7"]),
        ("r[1-2]-n[1-2]", ["r1-n1", "r1-n2", "r2-n1", "r2-n2"]),
        ("gpu[1,3].site.org", ["gpu1.site.org", "gpu3.site.org"]),
        ("[1-2]x", ["1x", "2x"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("n2,n1,n1", ["n2", "n1", "n1"]),
    ],
)
def test_a_list_expands_in_its_own_order(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("n[1-3", "a bracket is not closed"),
        ("n1-3]", "unbalanced bracket at position 4"),
        ("n[1-[2]]", "unbalanced bracket at position 4"),
        ("n[a-b]", "'a-b' is not a number or a range"),
        ("n[]", "'' is not a number or a range"),
        ("n[1-2-3]", "'1-2-3' is not a number or a range"),
        ("n[-1]", "'-1' is not a number or a range"),
        ("n[٣]", "'٣' is not a number or a range"),
        ("n[3-1]", "range '3-1' runs backwards"),
        ("n1,,n2", "an empty item"),
        ("n1,", "an empty item"),
        (",", "an empty item"),
        ("n1 n2", "cannot read ' n2'"),
        ("n[1-2000000]", "larger than 1000000"),
        ("n[1-600000],m[1-600000]", "more than 1000000 hosts"),
    ],
)
def test_what_is_no_list_is_refused_with_the_place(text: str, complaint: str) -> None:
    with pytest.raises(HostlistError) as refused:
        expand_hostlist(text)
    assert complaint in str(refused.value)
    assert repr(text) in str(refused.value)


@pytest.mark.timeout(60)
def test_a_list_of_too_many_hosts_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(HostlistError, match="more than 1000000 hosts"):
        expand_hostlist("n[1-999999][1-999999][1-999999]")


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n1", "n2", "n3", "n7"], "n[1-3,7]"),
        (["n9", "n10"], "n9,n10"),
        (["n009", "n010"], "n[009-010]"),
        (["n3", "n2", "n1"], "n[3,2,1]"),
        (["n1", "m1", "n2"], "n1,m1,n2"),
        (["login"], "login"),
        (["r1-n1", "r1-n2", "r2-n1"], "r1-n[1-2],r2-n1"),
    ],
)
def test_neighbours_join_into_ranges(hosts: list[str], text: str) -> None:
    assert compress_hostlist(hosts) == text


names = st.from_regex(r"[a-z]([a-z0-9.-]{0,6}[a-z0-9])?", fullmatch=True)
numbered = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}d}",
    st.sampled_from(["n", "gpu-", "r1-n", "x0y"]),
    st.integers(0, 120),
    st.integers(1, 4),
)


@given(st.lists(names | numbered))
@example(["n1", "n01", "n001"])
@example(["n99", "n100"])
@example(["n1", "n1", "n2"])
def test_a_compressed_list_expands_to_the_same_hosts_in_the_same_order(hosts: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(hosts)) == hosts


@given(st.text(alphabet="n1-[],x 9", max_size=20))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except HostlistError:
        return
    assert expand_hostlist(compress_hostlist(hosts)) == hosts
