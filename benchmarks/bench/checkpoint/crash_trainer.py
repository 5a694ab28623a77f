"""A trainer that saves without pause and is killed at any moment; says what it does, a line for each event.

Arguments: a directory, and ``files`` (a file for each step) or ``dcp`` (one directory, overwritten).
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import torch

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.file_writes import FileWrites
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

TENSORS, SIZE = 6, 700_000
_STEP_S = 0.005
_KEPT = 2


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {str(i): torch.full((SIZE + i,), float(step * TENSORS + i)) for i in range(TENSORS)}


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.pt"


def request_for(folder: Path, mode: str, step: int) -> AsyncRequest:
    if mode == "files":
        return AsyncRequest(FileWrites([(path_of(folder, step), state_of(step))]), (), [])
    writer = FileSystemWriterAsync(folder / "dcp", thread_count=2)
    plan = save_state_dict_async_plan(state_of(step), writer)
    save, preload, arguments = writer.get_save_function_and_args()
    return AsyncRequest(save, arguments, [partial(save_state_dict_async_finalize, *plan)], preload_fn=preload)


def main() -> None:
    folder, mode, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    storage.remove_leftovers(folder)
    queue = AsyncCallsQueue()
    while True:
        step += 1
        queue.schedule_async_request(request_for(folder, mode, step))
        print("worker", queue._caller._current.pid, flush=True)  # type: ignore[union-attr]
        while queue.get_num_unfinalized_calls():
            time.sleep(_STEP_S)  # stands for a training step
            try:
                if queue.maybe_finalize_async_calls():
                    print("committed", step, flush=True)
            except AsyncSaveError as error:
                print("failed", step, str(error).splitlines()[0], flush=True)
        for old in sorted(folder.glob("step_*.pt"))[:-_KEPT]:
            old.unlink()


if __name__ == "__main__":
    main()
