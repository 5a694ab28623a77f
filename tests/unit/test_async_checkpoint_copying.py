"""Copies of memory: every byte, and no other, whatever sizes and places are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.checkpointing.async_ckpt import copying

WAYS = list(dict.fromkeys([copying.copy, copying._copy_each]))
FREE = 0xEE


def run(copy: Callable[..., None], parts: list[tuple[int, int]], shift: int, threads: int) -> None:
    """Copy parts, each with a gap before it, and compare with what Python makes of that."""
    source = bytes(index * 31 % 251 for index in range(4099)) * (
        sum(size + gap for gap, size in parts) // 4099 + 2
    )
    target = bytearray([FREE] * len(source))
    expected = bytearray(target)
    to = ctypes.addressof(ctypes.c_char.from_buffer(target))
    start = ctypes.cast(ctypes.c_char_p(source), ctypes.c_void_p).value
    assert start is not None
    ranges, position = [], 0
    for gap, size in parts:
        position += gap
        ranges.append((to + position, start + position + shift, size))
        expected[position : position + size] = source[position + shift : position + shift + size]
        position += size
    copy(ranges, threads)
    assert target == expected


@pytest.mark.parametrize("copy", WAYS)
@given(
    parts=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 700)), max_size=8),
    shift=st.integers(0, 70),
    threads=st.integers(1, 4),
)
def test_every_byte_is_copied_and_none_beside_them(
    copy: Callable[..., None], parts: list[tuple[int, int]], shift: int, threads: int
) -> None:
    run(copy, parts, shift, threads)


@pytest.mark.parametrize("copy", WAYS)
@pytest.mark.parametrize("threads", [0, 1, 3, 64])
def test_large_ranges_are_shared_by_threads(copy: Callable[..., None], threads: int) -> None:
    run(copy, [(1, (3 << 20) + 5), (0, 0), (7, 63), (64, 1 << 20)], 3, threads)
