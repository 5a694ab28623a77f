"""When torch.profiler needs CUPTI, told before it takes it.

A process has one set of CUPTI's callbacks, and torch.profiler takes it in its warm-up, when no flag of torch
says yet that a profiler runs. Who then enabled or disabled records would take kernels out of its trace. So
two functions that :mod:`torch.autograd.profiler` calls are watched: they do what they did, and tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler


class TorchProfiler:
    """Tells whether torch.profiler has CUPTI.

    Args:
        module: what calls ``_prepare_profiler`` and ``_disable_profiler``; without them only a profiler that
            records already is known.
    """

    def __init__(self, module: Any = autograd_profiler) -> None:
        self._module = module
        self._holds = False
        self._has_seen_one = False
        self.before: Callable[[], None] = lambda: None
        """Called when it is about to take CUPTI."""
        for name, watched in (
            ("_prepare_profiler", self._prepare),
            ("_disable_profiler", self._disable),
        ):
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, functools.wraps(original)(functools.partial(watched, original)))

    def has_cupti(self) -> bool:
        """Tell whether it has CUPTI now, or will have it in a moment."""
        return self._holds or (not self._has_seen_one and bool(self._module._is_profiler_enabled))

    def _prepare(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        self._has_seen_one = True
        # The configuration, then what is to be recorded.
        wanted = args[1] if len(args) > 1 else keywords.get("activities", ())
        if torch.profiler.ProfilerActivity.CUDA in wanted:
            self.before()
            self._holds = True
        return original(*args, **keywords)

    def _disable(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        try:
            return original(*args, **keywords)
        finally:
            self._holds = False


@functools.cache
def torch_profiler() -> TorchProfiler:
    """Return that of this process."""
    return TorchProfiler()
