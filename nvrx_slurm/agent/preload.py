"""What the worker server imports ahead of every rank, and whether ranks can be forked after it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module


def preload(modules: Sequence[str]) -> str:
    """Import torch and ``modules``; return why ranks can't be forked after that, empty if they can."""
    try:
        import torch
        import torch.distributed
    except Exception as error:  # OSError, for instance, where a library of CUDA is missing
        return f"torch could not be imported: {error!r}"
    # The first optimizer imports it, which takes as long as torch itself; a release may do without.
    with contextlib.suppress(Exception):
        import torch._dynamo  # noqa: F401
    why_not = _import_all(modules)
    gc.collect()
    # Objects of the imports are never garbage: collecting them in every rank would only unshare their pages.
    gc.freeze()
    return why_not


def _import_all(modules: Sequence[str]) -> str:
    """Import the user's modules; return what is wrong with the first that spoils the server."""
    _fork_once()
    if why_not := why_not_forkable():
        return why_not
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            return f"--preload {name}: {error!r}"
        _fork_once()
        if why_not := why_not_forkable():
            return f"--preload {name}: {why_not}"
    return ""


def why_not_forkable() -> str:
    """Return why ranks can't be forked from this process, empty if they can."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the preloaded modules left {threads - 1} threads running"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    return ""


def _fork_once() -> None:
    """Shed the threads that OpenBLAS, which NumPy loads, has from its import on.

    It ends them before any fork and makes new ones when it is used (pthread_atfork(3)): what is left after
    one are threads that a rank would miss.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
