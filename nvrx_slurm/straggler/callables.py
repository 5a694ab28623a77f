"""Run functions of a model under sections of their own, without touching its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Section = Callable[[str], AbstractContextManager[None]]


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

    def wrap(self, callables: Iterable[CallableId], section: Section) -> None:
        """Put wrappers in place. A coroutine is timed from its first step to its last.

        Raises:
            AttributeError: an object has no attribute of that name; nothing was wrapped then.
            TypeError: it is nothing that can be timed or replaced; nothing was wrapped then.
        """
        chosen = _checked(callables)
        before = len(self._undo)
        for callable_id in chosen:
            try:
                self._undo.append(_replace(callable_id, section))
            except (AttributeError, TypeError) as error:
                self._restore_to(before)
                raise TypeError(f"{callable_id} can't be replaced: {error}") from error

    def restore(self) -> None:
        """Put every original back, the last one first."""
        self._restore_to(0)

    def _restore_to(self, count: int) -> None:
        while len(self._undo) > count:
            self._undo.pop()()


def _checked(callables: Iterable[CallableId]) -> list[CallableId]:
    if isinstance(callables, CallableId):
        raise TypeError("callable_ids is one CallableId: a list of them is accepted")
    chosen = list(callables)
    for callable_id in chosen:
        if not isinstance(callable_id, CallableId):
            raise TypeError(f"{callable_id!r} is among callable_ids: objects of CallableId are accepted")
        function = getattr(callable_id.obj, callable_id.name)
        if inspect.isclass(function):
            raise TypeError(f"{callable_id} is a class: name one of its methods")
        if not callable(function):
            raise TypeError(f"{callable_id} can't be called")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{callable_id} is a generator, which runs bit by bit: put sections into its body"
            )
    return chosen


def _replace(callable_id: CallableId, section: Section) -> Callable[[], None]:
    """Put a wrapper in place; return what undoes that."""
    obj, name, title = callable_id.obj, callable_id.name, str(callable_id)
    value = getattr(obj, name)
    try:
        # As it stands in the class, where a static or class method is an object of its own.
        own = inspect.getattr_static(obj, name)
    except AttributeError:  # it is made when it is asked for
        own = value
    replacement: Any
    if not inspect.isclass(obj):
        replacement = _timed(value, title, section)
    elif isinstance(own, staticmethod | classmethod):
        replacement = type(own)(_timed(own.__func__, title, section))
    elif hasattr(type(own), "__get__"):
        replacement = _timed(value, title, section)
    else:  # as a partial: an instance that calls it is not handed to it
        replacement = staticmethod(_timed(value, title, section))
    had = name in getattr(obj, "__dict__", {})
    setattr(obj, name, replacement)
    if had:
        return functools.partial(setattr, obj, name, own)
    if hasattr(type(own), "__set__"):  # of a slot
        return functools.partial(setattr, obj, name, value)
    return functools.partial(delattr, obj, name)


def _timed(function: Callable[..., Any], title: str, section: Section) -> Callable[..., Any]:
    @functools.wraps(function)
    async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
        with section(title):
            return await function(*args, **kwargs)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with section(title):
            return function(*args, **kwargs)

    return timed_coroutine if inspect.iscoroutinefunction(function) else timed
