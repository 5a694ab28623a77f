"""Several plug-ins as one."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any


class Compose:
    """Calls its parts from right to left, each with what the one before returned.

    ``Compose(a, b, c)(x)`` is ``a(b(c(x)))``. The object is an instance of the nearest class that all parts
    have in common, so a Compose of aborts is an ``Abort``. A tuple becomes the arguments of the next part; a
    part without parameters is called with none, and where it returns nothing the next gets what it would
    have got.

    Args:
        instances: the parts; at least one.

    Raises:
        TypeError: none was given, or one can't be called.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        if not instances:
            raise TypeError("Compose needs at least one part")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose takes parts that can be called, not {instance!r}")
        shared = _nearest_common_class(instances)
        kind = types.new_class(cls.__name__, (cls,) if shared is object else (cls, shared))
        if getattr(kind, "__abstractmethods__", None):
            # Of a class between its parts and their plug-in family; the parts have what is missing here.
            kind.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        made: Compose = object.__new__(kind)
        return made

    def __init__(self, *instances: Callable[..., Any]) -> None:
        self.instances = instances

    def __call__(self, *args: Any) -> Any:
        result: Any = None
        for instance in reversed(self.instances):
            given = args if _takes_arguments(instance) else ()
            result = instance(*given)
            if result is None and any(arg is not None for arg in given):
                warnings.warn(f"{instance} was given {given} and returned None", UserWarning, stacklevel=2)
            if result is not None or given:
                args = result if isinstance(result, tuple) else (result,)
        return result

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"


def _nearest_common_class(instances: tuple[object, ...]) -> type:
    first, *others = (type(instance) for instance in instances)
    for candidate in first.__mro__:
        # A Compose stands for what its own parts have in common; a function's class can't be derived from.
        if issubclass(candidate, Compose) or candidate is types.FunctionType:
            continue
        if all(issubclass(other, candidate) for other in others):
            return candidate if _can_be_derived_from(candidate) else object
    return object


def _can_be_derived_from(kind: type) -> bool:
    return bool(kind.__flags__ & (1 << 10))  # Py_TPFLAGS_BASETYPE


def _takes_arguments(function: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:  # a built-in that does not tell
        return True
