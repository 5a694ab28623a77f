"""``torch.save`` in the background."""

from __future__ import annotations

import os
from functools import partial
from numbers import Integral
from typing import Any

from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvrx_slurm.checkpointing.async_ckpt.file_writes import FileWrites
from nvrx_slurm.checkpointing.storage.layout import lay_out
from nvrx_slurm.checkpointing.storage.torch_file import save
from nvrx_slurm.fault_tolerance.checkpoint_reports import job_journal


class TorchAsyncCheckpoint:
    """Saves files that ``torch.load`` reads, while training goes on.

    ::

        checkpoint = TorchAsyncCheckpoint()
        checkpoint.async_save(state_dict, path)
        ...
        checkpoint.finalize_async_save()       # now and then; raises if a save has failed
        ...
        checkpoint.close()

    A file appears under its name when it is whole and on disk; what stood there stays until then.
    """

    save = staticmethod(save)

    def __init__(
        self,
        persistent_queue: bool = True,
        **queue_options: Any,
    ) -> None:
        """
        Args:
            persistent_queue: one worker for all saves; else one for each.
            queue_options: more arguments of :class:`AsyncCallsQueue`, by name.
        """
        self._queue = AsyncCallsQueue(persistent_queue, **queue_options)

    def prepare(self, state_dict: Any) -> None:
        """Allocate the memory that saves of such a state need, so that the first takes no longer than others.

        Raises:
            Exception: it can't be saved: what pickle says, or there is no memory.
        """
        self._queue.prepare(lay_out(state_dict).size)

    def async_save(
        self,
        state_dict: Any,
        f: str | os.PathLike[str],
        *args: Any,
        step: int | None = None,
        layer: str = "shared",
        **kwargs: Any,
    ) -> None:
        """Begin to save the state as it is now.

        Args:
            f: where to, a path or a URL for fsspec. Not an open file: that could not be replaced when it
                is whole.
            step: of training; when the save is finalized the job's journal is told of it, where there is one.
            layer: what the journal calls such checkpoints.

        Raises:
            TypeError: an open file or an option of torch.save, all of which would change the format; a step
                that is no integer.
        """
        if not isinstance(f, (str, os.PathLike)):
            raise TypeError(f"async_save takes a path, not {type(f).__name__}")
        if args or kwargs:
            raise TypeError("async_save takes a state and a path, and none of torch.save's options")
        if step is not None and not isinstance(step, Integral):
            raise TypeError(f"step is {step!r}, an integer is accepted")
        request = AsyncRequest(FileWrites([(os.fspath(f), state_dict)]), (), [])
        if step is not None:
            request.add_finalize_fn(partial(job_journal().report_checkpoint_saved, step, layer))
        self._queue.schedule_async_request(request)

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """See whether saves are done.

        Args:
            blocking: wait for all of them.
            no_dist: ask no other rank; else collective.
            terminate: close afterwards.

        Raises:
            AsyncSaveError: a save has failed.
        """
        self._queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self.close()

    def ensure_snapshotted(self) -> None:
        """Return when the tensors of all saves are copied, so that they may be changed."""
        self._queue.ensure_snapshotted()

    def close(self, abort: bool = False) -> None:
        """Wait for pending saves, or with ``abort`` forget them, and end the worker."""
        try:
            if not abort:
                self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        finally:
            self._queue.close(abort=abort)

    def _get_async_calls_queue(self) -> AsyncCallsQueue:
        return self._queue
