"""Run a call of the user's in the worker, with the tensors that the snapshot holds."""

from __future__ import annotations

import os
import sys
from multiprocessing import spawn
from typing import Any

import torch

from nvrx_slurm.checkpointing.async_ckpt.messages import CallWorld
from nvrx_slurm.checkpointing.storage.image import ImageSpec


def run_call(arena_fd: int, image: ImageSpec, world: CallWorld) -> None:
    """Unpickle and call; tensors of the trainer's devices arrive in host memory."""
    sys.path[:] = world.import_path
    if world.main_path is not None:
        # What the user's script defines: imported as multiprocessing does, under another name than __main__.
        spawn._fixup_main_from_path(world.main_path)  # type: ignore[attr-defined]
    with open(os.dup(arena_fd), "rb") as file:
        window = _Window(file, image.offset, image.size)
        # Written by the trainer into memory that only it and this process have.
        function, arguments, keywords, preload = torch.load(window, map_location="cpu", weights_only=False)
    if preload is not None:
        arguments[1] = preload()
    function(*arguments, **keywords)


class _Window:
    """A part of a file, as a file. Its position is its own: the trainer shares the descriptor."""

    def __init__(self, file: Any, offset: int, size: int) -> None:
        self._fd = file.fileno()
        self._offset = offset
        self._size = size
        self._position = 0

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + position
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int = -1) -> bytes:
        rest = self._size - self._position
        wanted = rest if count < 0 else min(count, rest)
        parts = []
        while wanted > 0 and (part := os.pread(self._fd, wanted, self._offset + self._position)):
            parts.append(part)
            self._position += len(part)
            wanted -= len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readline(self) -> bytes:
        raise NotImplementedError("only old torch files are read by line")
