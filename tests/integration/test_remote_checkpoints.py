"""Checkpoints in an object store: a real S3 server on this machine, reached by URL."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.snapshot import Snapshot
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.objects import open_store
from nvrx_slurm.cli.ckpt import main

LARGE = 10 << 20  # 40 MiB: sent in several parts


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """Found by the environment, by workers too."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environ = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    server.stop()


@pytest.fixture
def bucket(server: None, request: pytest.FixtureRequest) -> str:
    url = f"s3://bucket-{abs(hash(request.node.name)):x}"
    store, path = open_store(url)
    store.mkdir(path)
    return url


@pytest.fixture(scope="module")
def queue(server: None) -> Iterator[AsyncCallsQueue]:
    queue = AsyncCallsQueue()
    yield queue
    queue.close()


@pytest.fixture
def checkpoint(queue: AsyncCallsQueue) -> TorchAsyncCheckpoint:
    checkpoint = TorchAsyncCheckpoint(persistent_queue=False)
    checkpoint._queue = queue
    return checkpoint


def names(url: str) -> list[str]:
    store, path = open_store(url)
    return sorted(each.removeprefix(path + "/") for each in store.find(path))


def flip_a_bit(url: str, position: int) -> None:
    store, path = open_store(url)
    content = bytearray(store.cat_file(path))
    content[position] ^= 1
    store.pipe_file(path, bytes(content))


def ckpt(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(main, [*arguments, "--json"])
    return done.exit_code, json.loads(done.stdout) if done.stdout.startswith("{") else done.output


def states(*arguments: str) -> dict[str, str]:
    _, document = ckpt(*arguments)
    return {each["path"].rpartition("/")[2]: each["state"] for each in document["checkpoints"]}


def save_directory(queue: AsyncCallsQueue, state: dict[str, Any], url: str, *, commit: bool = True) -> None:
    writer = FileSystemWriterAsync(url, thread_count=2)
    plan = save_state_dict_async_plan(state, writer)
    save, preload, arguments = writer.get_save_function_and_args()
    finish = [partial(save_state_dict_async_finalize, *plan)] if commit else []
    queue.schedule_async_request(AsyncRequest(save, arguments, finish, preload_fn=preload))
    queue.maybe_finalize_async_calls(blocking=True)


def test_what_is_saved_in_the_background_is_there_whole_and_loads_verified(
    bucket: str, checkpoint: TorchAsyncCheckpoint
) -> None:
    state = {"large": torch.randn(LARGE), "small": torch.arange(5), "step": 7}
    checkpoint.async_save(state, f"{bucket}/a.pt")
    checkpoint.finalize_async_save(blocking=True)
    storage.save({"small": torch.ones(3)}, f"{bucket}/b.pt")
    loaded = storage.load(f"{bucket}/a.pt")
    assert torch.equal(loaded["large"], state["large"])
    assert loaded["step"] == 7
    assert storage.load(f"{bucket}/b.pt")["small"].sum() == 3
    assert names(bucket) == ["a.pt", "b.pt"]
    assert states("ls", bucket) == {"a.pt": "committed", "b.pt": "committed"}
    assert states("verify", bucket) == {"a.pt": "intact", "b.pt": "intact"}
    assert states("verify", f"{bucket}/b.pt") == {"b.pt": "intact"}


def test_a_flipped_bit_is_found(bucket: str) -> None:
    storage.save({"a": torch.randn(1000)}, f"{bucket}/a.pt")
    flip_a_bit(f"{bucket}/a.pt", 2000)
    with pytest.raises(CorruptCheckpointError, match=r"s3://.*/a\.pt: the tensor at byte"):
        storage.load(f"{bucket}/a.pt")
    code, document = ckpt("verify", bucket)
    assert code == 1
    assert document["checkpoints"][0]["state"] == "damaged"


def test_a_worker_that_is_killed_while_it_sends_leaves_what_was_there(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.save({"a": 1}, f"{bucket}/a.pt")
    checkpoint = TorchAsyncCheckpoint()
    sent, go, real = threading.Event(), threading.Event(), Snapshot._copy

    def copy(self: Snapshot, pieces: Any) -> None:
        if pieces[-1].target > 30 << 20:
            sent.set()
            go.wait(60)
        real(self, pieces)

    monkeypatch.setattr(Snapshot, "_copy", copy)
    checkpoint.async_save({"large": torch.zeros(LARGE)}, f"{bucket}/a.pt")
    assert sent.wait(60)
    worker = checkpoint._queue._caller._current  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    worker._reader.join(20)
    go.set()
    with pytest.raises(AsyncSaveError, match="SIGKILL"):
        checkpoint.finalize_async_save(blocking=True)
    assert storage.load(f"{bucket}/a.pt") == {"a": 1}
    checkpoint.async_save({"a": 2}, f"{bucket}/a.pt")
    checkpoint.close()
    assert storage.load(f"{bucket}/a.pt") == {"a": 2}


def test_a_missing_bucket_is_an_error_of_the_save(bucket: str, checkpoint: TorchAsyncCheckpoint) -> None:
    checkpoint.async_save({"a": 1}, "s3://there-is-no-such-bucket/a.pt")
    with pytest.raises(AsyncSaveError, match="bucket"):
        checkpoint.finalize_async_save(blocking=True)
    checkpoint.async_save({"a": 1}, f"{bucket}/a.pt")
    checkpoint.finalize_async_save(blocking=True)
    assert names(bucket) == ["a.pt"]


def test_a_directory_counts_when_its_metadata_is_there_and_torch_reads_it(
    bucket: str, queue: AsyncCallsQueue
) -> None:
    state = {"w": torch.randn(500_000), "b": torch.randn(300, 7), "step": 3}
    save_directory(queue, state, f"{bucket}/torn", commit=False)
    for value in (1.0, 2.0):  # the second takes the place of the first
        state["b"].fill_(value)
        save_directory(queue, state, f"{bucket}/whole")
    assert states("ls", bucket) == {"torn": "torn", "whole": "committed"}
    assert states("verify", f"{bucket}/whole") == {"whole": "intact"}
    listed = [name for name in names(f"{bucket}/whole") if name.endswith(".distcp")]
    assert len(listed) == 2  # those of the first are gone
    for reader in (CachedMetadataFileSystemReader(f"{bucket}/whole"), FsspecReader(f"{bucket}/whole")):
        loaded = {"w": torch.zeros(500_000), "b": torch.zeros(300, 7), "step": 0}
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert torch.equal(loaded["w"], state["w"])
        assert bool((loaded["b"] == 2).all())
        assert loaded["step"] == 3
    flip_a_bit(f"{bucket}/whole/{listed[0]}", 5000)
    with pytest.raises(CheckpointException, match="is not what was written"):
        dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(f"{bucket}/whole"), no_dist=True)
    assert states("verify", f"{bucket}/whole") == {"whole": "damaged"}


def test_old_ones_are_removed_by_step_and_contents_are_shown(bucket: str, queue: AsyncCallsQueue) -> None:
    for step in (10, 9, 2):
        storage.save({"w": torch.ones(4, 3), "step": step}, f"{bucket}/step_{step}.pt")
        save_directory(queue, {"w": torch.ones(5)}, f"{bucket}/dcp_{step}", commit=step != 2)
    code, document = ckpt("inspect", f"{bucket}/step_9.pt")
    assert code == 0
    assert [(each["name"], each["shape"]) for each in document["entries"]] == [("w", [4, 3]), ("step", None)]
    assert ckpt("inspect", f"{bucket}/dcp_9")[1]["entries"][0]["shape"] == [5]
    assert ckpt("inspect", bucket)[0] == 1
    before = names(bucket)
    assert len(ckpt("prune", bucket, "--keep", "1", "--dry-run")[1]["removed"]) == 3
    assert names(bucket) == before
    _, document = ckpt("prune", bucket, "--keep", "1")
    removed = {url.rpartition("/")[2] for url in document["removed"]}
    assert removed == {"step_2.pt", "step_9.pt", "dcp_9"}  # dcp_2 is newer than all, and may be written now
    assert states("verify", bucket) == {"step_10.pt": "intact", "dcp_10": "intact", "dcp_2": "torn"}
    assert ckpt("prune", f"{bucket}/dcp_10", "--keep", "1")[0] == 1


def test_a_url_that_nothing_knows_is_refused_with_a_sentence() -> None:
    with pytest.raises(OSError, match=r"nosuch://there can.t be reached: .*nosuch"):
        storage.save({}, "nosuch://there")
    code, output = ckpt("ls", "nosuch://there")
    assert code == 1
    assert "can't be reached" in output


def test_any_other_store_of_fsspec_will_do() -> None:
    MemoryFileSystem.store.clear()
    storage.save({"a": torch.ones(3)}, "memory://run/a.pt")
    assert storage.load("memory://run/a.pt")["a"].sum() == 3
    assert states("verify", "memory://run") == {"a.pt": "intact"}
    storage.save({}, "memory://run/b.pt")
    assert ckpt("inspect", "memory://run/a.pt")[1]["entries"][0]["shape"] == [3]
    assert ckpt("prune", "memory://run", "--keep", "1")[1]["removed"] == ["memory://run/a.pt"]
