"""What ``.metadata`` of a directory may name: nothing that does something when it is unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError


def call(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls ``module.name``; dots in the name lead to what it has imported itself."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    values = b"".join(map(text, arguments))
    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + values + b"tR."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "io.FileIO"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.metadata", "os._wrap_close"),
        ("torch.distributed.checkpoint.metadata", "torch.UntypedStorage.from_file"),
        ("io", "FileIO"),
        ("builtins", "set.__class__"),
    ],
)
def test_nothing_is_executed(tmp_path: Path, module: str, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("important")
    (tmp_path / ".metadata").write_bytes(call(module, name, str(victim), "w"))
    with pytest.raises(CorruptCheckpointError, match="no place in a checkpoint"):
        CachedMetadataFileSystemReader(tmp_path).read_metadata()
    assert victim.read_text() == "important"


def test_whatever_is_wrong_with_it_is_one_kind_of_error(tmp_path: Path) -> None:
    whole = pickle.dumps(Metadata({}, storage_data={}))
    for end in range(len(whole)):
        (tmp_path / ".metadata").write_bytes(whole[:end])
        with pytest.raises(CorruptCheckpointError):
            CachedMetadataFileSystemReader(tmp_path, cache_metadata=False).read_metadata()
    (tmp_path / ".metadata").write_bytes(call("torch.distributed.checkpoint.metadata", "Metadata"))
    with pytest.raises(CorruptCheckpointError, match="can't be read"):
        CachedMetadataFileSystemReader(tmp_path).read_metadata()
