"""Small helpers under the names that users of NVIDIA's extension import."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

_log = logging.getLogger(__name__)


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a copy of nested dictionaries and lists with ``f`` of each leaf; ``x`` stays as it is."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def preload_tensors(state_dict: Any, non_blocking: bool = True) -> Any:
    """Return a copy of a state, in nested dictionaries and lists, with its tensors in host memory.

    Tensors that are there already are copied, too: what is saved must not change with training.

    Args:
        non_blocking: of a GPU's tensors; then synchronize before you read them.
    """

    def preload(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        return leaf.clone() if leaf.device.type == "cpu" else leaf.to("cpu", non_blocking=non_blocking)

    return dict_list_map_outplace(preload, state_dict)


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` so that no garbage is collected while it runs."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _disable_gc():
            return fn(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _disable_gc() -> Iterator[None]:
    """Collect no garbage in this context; afterwards again, if it was so before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log how long the context took; also a decorator.

    Args:
        logger: where to; this module's if None.
        threshold: say nothing of less, in seconds.
        level: DEBUG if None; WARNING with a threshold.
    """
    began = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - began
        if took >= threshold:
            default = logging.DEBUG if threshold == float("-inf") else logging.WARNING
            (logger or _log).log(default if level is None else level, "%s took %.4fs", name, took)
