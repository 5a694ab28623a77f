"""Small helpers under the names that users of NVIDIA's extension import; nothing here needs them."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

_stack: list[tuple[str, logging.Logger]] = []


@contextlib.contextmanager
def logger_stack(
    name: str | None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Add ``name`` to those around it, joined by dots; yield the whole name, and the logger that counts."""
    outer, logger = _stack[-1] if _stack else ("", logging.getLogger(__name__))
    _stack.append((".".join(filter(None, (outer, name))), current_logger or logger))
    try:
        yield _stack[-1]
    finally:
        _stack.pop()


@contextlib.contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = -math.inf, level: int | None = None
) -> Iterator[None]:
    """Log how long the context, or the function that this decorates, takes: ``outer.name took 1.2345s``.

    Args:
        logger: of the contexts around it by default.
        threshold: say nothing below so many seconds; with one it is a warning.
        level: another one than DEBUG, or than WARNING with a threshold.
    """
    chosen = level or (logging.DEBUG if threshold == -math.inf else logging.WARNING)
    with logger_stack(name, logger) as (stacked, log):
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            if took > threshold:
                log.log(chosen, f"{stacked} took {took:.4f}s")


def debug_msg(msg: str) -> None:
    """Log ``msg`` at DEBUG behind the name of the contexts around it."""
    with logger_stack(None) as (stacked, log):
        log.debug(f"{stacked} {msg}")


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return nested dicts and lists with what is in them replaced by what ``f`` makes of it."""
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


@contextlib.contextmanager
def _disable_gc() -> Iterator[None]:
    """Switch the garbage collector off for a while."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn``, run without garbage collection."""

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _disable_gc():
            return fn(*args, **kwargs)

    return wrapped


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Compare nested dicts and lists; return the paths that only one has, only the other, and that differ."""
    if isinstance(x1, list) and isinstance(x2, list):
        x1, x2 = dict(enumerate(x1)), dict(enumerate(x2))
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1 if key not in x2]
        right = [(*prefix, key) for key in x2 if key not in x1]
        unequal: list[Any] = []
        for key in x1:
            if key in x2:
                found = diff(x1[key], x2[key], (*prefix, key))
                left, right, unequal = left + found[0], right + found[1], unequal + found[2]
        return left, right, unequal
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        same = x1.dtype == x2.dtype and torch.equal(x1, x2)
    else:
        same = type(x1) is type(x2) and bool(x1 == x2)
    return [], [], [] if same else [(prefix, type(x1), type(x2))]
