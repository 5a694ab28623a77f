"""Parts of a file that are read and hashed on several threads, and files that change meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError, checked_load, checksum
from nvrx_slurm.checkpointing.storage.checked_read import reading
from nvrx_slurm.checkpointing.storage.checksums import Region, Table
from nvrx_slurm.checkpointing.storage.host_memory import host_bytes, new_storage

MIB = 1 << 20


@pytest.fixture
def content() -> bytes:
    return random.Random(1).randbytes(9 * MIB + 5)


@pytest.fixture
def fd(tmp_path: Path, content: bytes) -> Iterator[int]:
    (tmp_path / "file").write_bytes(content)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


class TestReading:
    @pytest.mark.parametrize("length", [1, 256 << 10, (256 << 10) + 1, MIB, MIB + 1, 9 * MIB])
    def test_a_part_is_read_whole_and_its_checksum_is_that_of_its_bytes_in_order(
        self, fd: int, content: bytes, length: int
    ) -> None:
        target = bytearray(length)
        with reading(fd) as reads:
            found = reads.start(Region(3, length), memoryview(target)).checksum()
        assert target == content[3 : 3 + length]
        assert found == checksum(content[3 : 3 + length])

    def test_many_parts_are_read_at_a_time(self, fd: int, content: bytes) -> None:
        starts = random.Random(2).sample(range(6 * MIB), 40)
        regions = [Region(start, 3 * MIB - start % MIB) for start in starts]
        targets = [bytearray(region.length) for region in regions]
        with reading(fd) as reads:
            found = [reads.start(*each) for each in zip(regions, map(memoryview, targets), strict=True)]
            sums = [each.checksum() for each in found]
        assert sums == [checksum(content[region.offset : region.end]) for region in regions]

    @pytest.mark.parametrize("length", [100, 4 * MIB])
    def test_a_part_behind_the_end_of_the_file_has_no_checksum(
        self, fd: int, content: bytes, length: int
    ) -> None:
        target = memoryview(bytearray(length))
        with reading(fd) as reads:
            assert reads.start(Region(len(content) - length + 1, length), target).checksum() is None

    def test_what_can_not_be_read_is_an_error(self, tmp_path: Path) -> None:
        directory = os.open(tmp_path, os.O_RDONLY)
        try:
            with reading(directory) as reads, pytest.raises(IsADirectoryError):
                reads.start(Region(0, 4 * MIB), memoryview(bytearray(4 * MIB))).checksum()
        finally:
            os.close(directory)


class TestLoadOfLargeTensors:
    """Larger than what is read by one thread, and than what is read ahead."""

    @pytest.fixture
    def state(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(checked_load, "_AHEAD", 4 * MIB)
        sizes = [3 * MIB + 3, 1, 5 * MIB, 300_000, 6 * MIB, 2 * MIB]
        return {str(i): torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}

    def test_they_are_what_was_saved(self, tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
        storage.save(state, tmp_path / "a.pt")
        loaded = storage.load(tmp_path / "a.pt")
        assert all(torch.equal(loaded[key], state[key]) for key in state)

    def test_a_flipped_bit_in_any_of_them_is_found(
        self, tmp_path: Path, state: dict[str, torch.Tensor]
    ) -> None:
        path = tmp_path / "a.pt"
        storage.save(state, path)
        for position in random.Random(1).sample(range(path.stat().st_size), 8):
            with open(path, "r+b") as file:
                file.seek(position)
                right = file.read(1)[0]
                file.seek(position)
                file.write(bytes([right ^ 1 << position % 8]))
            with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
                storage.load(path)
            with open(path, "r+b") as file:
                file.seek(position)
                file.write(bytes([right]))
        assert torch.equal(storage.load(path)["4"], state["4"])

    @pytest.mark.parametrize("change", ["cut", "overwritten"])
    def test_a_file_that_changes_after_its_table_was_read_is_refused(
        self,
        tmp_path: Path,
        state: dict[str, torch.Tensor],
        monkeypatch: pytest.MonkeyPatch,
        change: str,
    ) -> None:
        path = tmp_path / "a.pt"
        storage.save(state, path)
        real = checked_load.find_table

        def and_then_it_changes(where: Path, view: memoryview) -> Table | None:
            table = real(where, view)
            assert table is not None
            last = list(table.sums)[-1]
            with open(path, "r+b") as file:
                if change == "cut":
                    monkeypatch.setattr(Table, "check_rest", lambda *_: None)  # it was whole until then
                    file.truncate(last.offset + 5)
                else:
                    file.seek(last.offset + last.length // 2)
                    file.write(b"changed")
            return table

        monkeypatch.setattr(checked_load, "find_table", and_then_it_changes)
        with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
            storage.load(path)

    def test_a_table_of_places_behind_the_end_of_the_file_is_refused(self) -> None:
        whole = memoryview(bytes(100))
        table = Table(Region(90, 10), {Region(0, 1 << 50): 1, Region(60, 30): 2}, 0)
        with pytest.raises(CorruptCheckpointError):
            table.check_rest("a.pt", whole)


class TestNewStorage:
    @pytest.mark.parametrize("size", [0, 1, 4 * MIB - 1, 4 * MIB, 7 * MIB + 3])
    def test_it_has_its_size_and_keeps_what_is_written(self, size: int) -> None:
        made = new_storage(size)
        view = host_bytes(made)
        view[:] = bytes([7]) * size
        assert made.nbytes() == size
        assert torch.empty(0, dtype=torch.uint8).set_(made).eq(7).all()

    def test_a_large_one_begins_at_a_huge_page(self) -> None:
        assert new_storage(5 * MIB).data_ptr() % (2 * MIB) == 0
