"""Run functions of a model under sections of their own, without touching its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallableId:
    """A callable by the object that holds it (a module, a class or an instance) and its name there.

    The last three are accepted for code that passes them, and mean nothing, as in the package that has them.
    """

    obj: Any
    name: str
    arg_filter_fn: Callable[..., Any] | None = None
    extra_args_fn: Callable[..., Any] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if inspect.ismodule(self.obj):
            return f"{self.obj.__name__}.{self.name}"
        if inspect.isclass(self.obj):
            return f"{self.obj.__module__}.{self.obj.__name__}.{self.name}"
        return f"{type(self.obj).__name__}.{self.name}"


class WrappedCallables:
    """The callables that run under a section, and what they were before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(
        self, callables: Iterable[CallableId], section: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        """Put wrappers in place.

        Raises:
            AttributeError: an object has no attribute of that name; nothing was wrapped then.
            TypeError: it can't be called; nothing was wrapped then.
        """
        chosen = list(callables)
        for callable_id in chosen:
            if not callable(getattr(callable_id.obj, callable_id.name)):
                raise TypeError(f"{callable_id} can't be called")
        for callable_id in chosen:
            self._wrap(callable_id, section)

    def _wrap(self, callable_id: CallableId, section: Callable[[str], AbstractContextManager[None]]) -> None:
        obj, name, title = callable_id.obj, callable_id.name, str(callable_id)
        # As it stands in the class, where a static or class method is an object of its own.
        own = inspect.getattr_static(obj, name)
        kind = type(own) if isinstance(own, staticmethod | classmethod) else None
        function: Callable[..., Any] = own.__func__ if kind is not None else getattr(obj, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with section(title):
                return function(*args, **kwargs)

        had = name in getattr(obj, "__dict__", {})
        setattr(obj, name, kind(timed) if kind is not None and inspect.isclass(obj) else timed)
        self._undo.append(functools.partial(setattr, obj, name, own) if had else lambda: delattr(obj, name))

    def restore(self) -> None:
        """Put every original back, the last one first."""
        while self._undo:
            self._undo.pop()()
