"""Which parameters of a function are given its ``CallWrapper``."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any


def parameters_of_type(function: Callable[..., Any], kind: type) -> list[str]:
    """Return the parameters annotated as exactly ``kind``, ``Optional[kind]`` or ``kind | None``.

    Annotations may be strings. One that can't be resolved, or is anything else, is left alone.
    """
    hints = _hints(function)
    return [
        name for name in inspect.signature(function).parameters if name in hints and _is(hints[name], kind)
    ]


def with_injected(
    signature: inspect.Signature,
    names: list[str],
    value: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with ``value`` for each of ``names``.

    Raises:
        TypeError: the arguments don't fit the function.
    """
    if not names:
        return args, kwargs
    bound = signature.bind_partial(*args, **kwargs)
    for name in names:
        bound.arguments[name] = value
    return bound.args, bound.kwargs


def _is(hint: object, kind: type) -> bool:
    if hint is kind:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set(typing.get_args(hint)) == {kind, type(None)}
    return False


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = inspect.unwrap(plain)
    if not inspect.isroutine(plain) and callable(plain):
        plain = type(plain).__call__
    annotations = dict(getattr(plain, "__annotations__", {}))
    annotations.pop("return", None)
    # One by one: a name that only a type checker knows must not hide the others.
    return {name: _resolved(plain, name, annotation) for name, annotation in annotations.items()}


def _resolved(function: Any, name: str, annotation: object) -> object:
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}))[name]
    except Exception:
        return None
