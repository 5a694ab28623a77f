"""Files of checkpoints: whole or absent, verified bit by bit, and readable by torch.load."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.storage import (
    CorruptCheckpointError,
    Verification,
    checked_load,
    remove_leftovers,
)


def state() -> dict[str, Any]:
    shared = torch.arange(1000.0)
    return {
        "large": torch.randn(3_000_001),
        "bfloat16": torch.randn(33, 7, dtype=torch.bfloat16),
        "complex": torch.randn(5, dtype=torch.complex64),
        "float8": torch.randn(16).to(torch.float8_e4m3fn),
        "quantised": torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "non-contiguous": torch.randn(6, 4).t()[::2],
        "shared": [shared, shared[10:20]],
        "sparse": torch.eye(4).to_sparse(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "meta": torch.empty(4, device="meta"),
        "objects": ("text", 3, 2.5, None, {"nested": (1, 2)}),
    }


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, with types, shapes and strides."""
    if isinstance(left, torch.Tensor):
        alike = type(left) is type(right) and left.dtype == right.dtype and left.shape == right.shape
        if not alike or left.device.type == "meta":
            return alike
        if left.is_sparse:
            return same(left.coalesce().values(), right.coalesce().values())
        if left.is_quantized:
            return bool(torch.equal(left.int_repr(), right.int_repr())) and left.q_scale() == right.q_scale()
        return left.stride() == right.stride() and bits(left) == bits(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.detach().contiguous().flatten().view(torch.uint8).untyped_storage())


class TestOneFile:
    def test_torch_load_reads_every_kind_of_tensor_and_object_back(self, tmp_path: Path) -> None:
        saved = state()
        storage.save(saved, tmp_path / "a.pt")
        large = saved.pop("large")
        for loaded in (
            torch.load(tmp_path / "a.pt", weights_only=True),
            storage.load(tmp_path / "a.pt", mmap=True),
            storage.load(tmp_path / "a.pt"),
        ):
            assert torch.equal(loaded.pop("large"), large)
            assert same(saved, loaded)
            assert loaded["shared"][0].data_ptr() + 40 == loaded["shared"][1].data_ptr()

    @pytest.mark.parametrize(
        "where",
        [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _location: storage],
        ids=["none", "name", "device", "mapping", "function"],
    )
    def test_it_loads_to_where_map_location_says(self, tmp_path: Path, where: Any) -> None:
        storage.save([torch.arange(9), torch.ones(3_000_000)], tmp_path / "a.pt")
        loaded = storage.load(tmp_path / "a.pt", map_location=where)
        assert torch.equal(loaded[0], torch.arange(9))
        assert torch.equal(loaded[1], torch.ones(3_000_000))
        assert [each.device.type for each in storage.load(tmp_path / "a.pt", map_location="meta")] == [
            "meta"
        ] * 2

    def test_storages_in_another_order_than_expected_are_loaded_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage.save([torch.arange(9), torch.ones(1000), torch.zeros(3_000_000)], tmp_path / "a.pt")
        real = checked_load.find_table

        def reversed_table(path: Path, view: memoryview) -> Any:
            table = real(path, view)
            assert table is not None
            return dataclasses.replace(table, sums=dict(reversed(table.sums.items())))

        monkeypatch.setattr(checked_load, "find_table", reversed_table)
        loaded = storage.load(tmp_path / "a.pt")
        assert [each.sum().item() for each in loaded] == [36, 1000, 0]

    def test_nothing_but_the_file_is_left_and_only_its_owner_can_read_it(self, tmp_path: Path) -> None:
        storage.save({"a": torch.ones(3)}, tmp_path / "a.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
        assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o600

    def test_a_flipped_bit_is_found_wherever_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        storage.save({"a": torch.randn(50), "b": torch.randn(3), "text": "x" * 50}, path)
        content = path.read_bytes()
        assert storage.verify_file(path) is Verification.INTACT
        for position in random.Random(1).sample(range(len(content)), 500):
            damaged = bytearray(content)
            damaged[position] ^= 1 << (position % 8)
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match=r"a\.pt"):
                storage.load(path)

    def test_a_file_that_is_cut_anywhere_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        storage.save({"a": torch.randn(500)}, path)
        content = path.read_bytes()
        for length in random.Random(1).sample(range(len(content)), 100):
            path.write_bytes(content[:length])
            with pytest.raises(CorruptCheckpointError):
                storage.verify_file(path)

    def test_of_a_file_that_torch_saved_it_says_that_it_cannot_tell(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
        assert storage.verify_file(tmp_path / "a.pt") is Verification.NO_CHECKSUMS
        assert torch.equal(storage.load(tmp_path / "a.pt")["a"], torch.ones(3))

    def test_a_pickle_that_would_execute_code_is_not_loaded_unless_it_is_wished(self, tmp_path: Path) -> None:
        storage.save({"path": tmp_path}, tmp_path / "a.pt")
        with pytest.raises(Exception, match="weights_only"):
            storage.load(tmp_path / "a.pt")
        assert storage.load(tmp_path / "a.pt", weights_only=False) == {"path": tmp_path}

    def test_what_cannot_be_pickled_leaves_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        storage.save(1, path)
        with pytest.raises(Exception, match="pickle"):
            storage.save(lambda: None, path)
        assert storage.load(path) == 1
        assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]

    def test_two_types_in_the_same_memory_are_refused_as_torch_does(self, tmp_path: Path) -> None:
        tensor = torch.ones(4)
        with pytest.raises(RuntimeError, match="same memory"):
            storage.save([tensor, tensor.view(torch.int32)], tmp_path / "a.pt")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Where fsync(2) takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class TestReplacing:
    def test_a_full_disk_leaves_the_old_file_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage.write_bytes(tmp_path / "a", b"old")

        def full(_fd: int, _data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            storage.write_bytes(tmp_path / "a", b"new")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert (tmp_path / "a").read_bytes() == b"old"

    def test_file_and_directory_are_synced_in_this_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []
        note_calls(monkeypatch, calls, "fsync", lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        note_calls(monkeypatch, calls, "rename", lambda _source, target: Path(target).name)
        storage.write_bytes(tmp_path / "a", b"new")
        assert [call.split(" ")[0] for call in calls] == ["fsync", "rename", "fsync"]
        assert "nvrx-tmp" in calls[0]
        assert calls[1] == "rename a"

    def test_a_killed_writers_leftover_is_removed_and_a_living_writers_file_is_not(
        self, tmp_path: Path
    ) -> None:
        program = (
            "import sys\nfrom nvrx_slurm.checkpointing.storage import replacing\n"
            "with replacing(sys.argv[1]) as file:\n file.write(b'half')\n print('written', flush=True)\n"
            " sys.stdin.read()"
        )
        writer = subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "a"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"written\n"
            assert storage.remove_leftovers(tmp_path) == []
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        assert len(storage.remove_leftovers(tmp_path)) == 1
        assert list(tmp_path.iterdir()) == []

    def test_who_cleans_up_at_any_moment_takes_no_file_from_its_writer(self, in_memory: Path) -> None:
        done = threading.Event()

        def clean() -> None:
            while not done.is_set():
                remove_leftovers(in_memory)

        cleaners = [threading.Thread(target=clean) for _ in range(2)]
        for cleaner in cleaners:
            cleaner.start()
        try:
            for number in range(50):
                storage.write_bytes(in_memory / "a", str(number).encode())
        finally:
            done.set()
            for cleaner in cleaners:
                cleaner.join(100)
        assert (in_memory / "a").read_bytes() == b"49"

    def test_a_missing_directory_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="missing"):
            storage.write_bytes(tmp_path / "missing" / "a", b"")

    def test_made_directories_are_for_their_owner_only(self, tmp_path: Path) -> None:
        storage.make_directory(tmp_path / "a" / "b")
        storage.make_directory(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            storage.make_directory(tmp_path / "file")

    @pytest.mark.parametrize("folder", ["/dev/shm", "."])
    def test_it_writes_where_direct_io_is_possible_and_where_it_is_not(self, folder: str) -> None:
        path = Path(folder, f"nvrx-test-storage-{os.getpid()}")
        try:
            storage.save(torch.arange(10_000_000), path)
            assert torch.equal(storage.load(path), torch.arange(10_000_000))
        finally:
            path.unlink(missing_ok=True)


def note_calls(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], name: str, describe: Callable[..., str]
) -> None:
    real = getattr(os, name)

    def noted(*arguments: Any) -> Any:
        calls.append(f"{name} {describe(*arguments)}")
        return real(*arguments)

    monkeypatch.setattr(os, name, noted)
