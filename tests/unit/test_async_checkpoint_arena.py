"""Memory of snapshots: what is copied to it is there, before and after its pages are mapped."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch

from nvrx_slurm.checkpointing.async_ckpt.arena import Arena, ArenaPool

SIZE = 9 * (1 << 20) + 5


def copy(arena: Arena, content: torch.Tensor, place: int, threads: int) -> None:
    arena.copy([(place, content.data_ptr(), content.numel()), (0, content.data_ptr(), 3)], threads)


def wait_for_memory() -> None:
    for thread in threading.enumerate():
        if thread.name == "nvrx-memory":
            thread.join(100)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_is_there_before_and_after_all_memory_is_mapped(threads: int) -> None:
    arena = Arena(SIZE + 11)
    for content in (torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for _ in range(2)):
        copy(arena, content, 11, threads)
        assert torch.equal(arena.as_tensor(11, SIZE), content)
        assert torch.equal(arena.as_tensor(0, 3), content[:3])
        assert bytes(arena.memory[3:11]) == bytes(8)
        assert os.pread(arena.fd, 100, 11) == bytes(content[:100].tolist())
        arena.fault_in()


def test_memory_is_mapped_once_its_first_snapshot_has_been_written() -> None:
    pool = ArenaPool()
    arena = pool.acquire(SIZE)
    content = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    copy(arena, content, 0, 1)
    assert not arena._is_faulted_in
    pool.release(arena)
    wait_for_memory()
    assert arena._is_faulted_in
    assert torch.equal(arena.as_tensor(0, SIZE), content)


def test_memory_that_nobody_wants_any_more_goes_while_it_is_being_mapped() -> None:
    arena = Arena(1 << 30)
    gone = weakref.ref(arena)
    arena.fault_in_meanwhile()
    del arena
    wait_for_memory()
    gc.collect()
    assert gone() is None


def test_a_program_that_ends_can_still_copy_with_the_thread_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    arena, content = Arena(SIZE + 11), torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    copy(arena, content, 11, 3)
    assert torch.equal(arena.as_tensor(11, SIZE), content)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_source_that_has_gone_is_an_error_of_the_first_copy(threads: int) -> None:
    with pytest.raises(OSError, match="Bad address"):
        Arena(SIZE).copy([(place, 8, 100) for place in (0, 100, 200)], threads)
