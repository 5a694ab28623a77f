"""Memory that one side fills while another writes it to a file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nvrx_slurm.checkpointing.storage.checksums import (
    Region,
    Verification,
    encode_trailer,
    table_size,
    verify_file,
)
from nvrx_slurm.checkpointing.storage.filling import AbandonedError, Filling
from nvrx_slurm.checkpointing.storage.image import ImageSpec, aligned, write_image


def spec_of(path: Path, tensors: int, each: int) -> ImageSpec:
    """A file of tensors one after another, with its table of checksums and the trailer behind them."""
    regions = tuple(Region(i * each, each) for i in range(tensors))
    table = Region(tensors * each, table_size(tensors))
    return ImageSpec(str(path), 0, table.end + len(encode_trailer(0)), regions, table)


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_file_is_written_behind_whoever_fills_it_and_named_when_that_one_is_done(
    tmp_path: Path, at_once: int
) -> None:
    each = 3 << 20
    spec = spec_of(tmp_path / "a", 5, each)
    memory = memoryview(bytearray(aligned(spec.size)))
    memory[spec.table.end : spec.size] = encode_trailer(spec.table.length)
    filling = Filling()
    paced: list[int] = []
    writer = threading.Thread(
        target=lambda: write_image(spec, memory, filling, at_once=at_once, pace=paced.append)
    )
    writer.start()
    for number, region in enumerate(spec.regions):
        memory[region.offset : region.end] = bytes([number + 1]) * each
        filling.advance(region.end)
    assert not (tmp_path / "a").exists()
    filling.finish()
    writer.join(100)
    content = (tmp_path / "a").read_bytes()
    assert content[::each][:5] == bytes([1, 2, 3, 4, 5])
    assert len(content) == spec.size
    assert verify_file(tmp_path / "a") is Verification.INTACT
    assert sum(paced) == aligned(spec.size)


def test_of_memory_that_is_given_up_no_file_is_left(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "a", 5, 3 << 20)
    filling = Filling()
    filling.advance(4 << 20)
    threading.Timer(0.05, filling.fail, ["the tensors were changed"]).start()
    with pytest.raises(AbandonedError, match="the tensors were changed"):
        write_image(spec, memoryview(bytearray(aligned(spec.size))), filling)
    assert list(tmp_path.iterdir()) == []


def test_what_is_whole_cannot_fail_any_more() -> None:
    filling = Filling.complete()
    filling.fail("the trainer has ended")
    filling.wait_for(1 << 40)
    filling.wait_until_whole()
