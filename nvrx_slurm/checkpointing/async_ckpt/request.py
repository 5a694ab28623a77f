"""A save, as a value: what runs in the background, and what follows when it is done everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from nvrx_slurm.checkpointing.async_ckpt.agreement import agree


class AsyncRequest(NamedTuple):
    """A function that runs in the background, and finalizers that run in the trainer afterwards.

    ``async_fn_args[1]`` is replaced by what ``preload_fn`` returns, if there is one; it is called in the
    process that runs ``async_fn``. Tensors among the arguments are taken as they are when the request is
    scheduled; a worker gets those of a GPU in host memory.
    """

    async_fn: Callable[..., Any] | None
    """None: nothing to do in the background."""
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], Any]]
    """Called in this order when ``async_fn`` is done on all ranks; they stay in the trainer."""
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a finalizer behind the others.

        Raises:
            RuntimeError: the request has been scheduled.
        """
        if self.is_frozen:
            raise RuntimeError("this request has been scheduled: finalizers can't be added any more")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return a copy that takes no more finalizers."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Do everything now: the function, a barrier where there is a process group, the finalizers."""
        if self.async_fn is not None:
            arguments = list(self.async_fn_args)
            if self.preload_fn is not None:
                arguments[1] = self.preload_fn()
            self.async_fn(*arguments, **(self.async_fn_kwargs or {}))
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalizers; return the index of the call.

        Raises:
            RuntimeError: with ``validate_matching_call_idx``, ranks finalize different calls; collective.
        """
        if validate_matching_call_idx:
            said = agree(self.call_idx, done=True, failed=False)
            if said.lowest_index != said.highest_index:
                raise RuntimeError(
                    f"ranks finalize different saves: {said.lowest_index} and {said.highest_index}, here "
                    f"{self.call_idx}"
                )
        for finalize in self.finalize_fns:
            finalize()
        return self.call_idx
