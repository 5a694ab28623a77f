"""Refusals of arguments: each is one sentence that names the argument, its value and the rule."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta


def check_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Refuse what is no ``kind``; with ``optional`` None passes.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, kind) or (optional and value is None):
        return
    accepted = f"{_article(kind)}{' or None' if optional else ''}"
    hint = f", and this is a class: {_name(value)}() makes one" if _is_class(value, kind) else ""
    raise TypeError(f"{name} is {_shown(value)}: {accepted} is accepted{hint}")


def check_subclass(name: str, value: object, kind: type) -> None:
    """Refuse what is no class derived from ``kind``.

    Raises:
        TypeError: it is something else.
    """
    if not _is_class(value, kind):
        raise TypeError(f"{name} is {_shown(value)}: a class derived from {kind.__name__} is accepted")


def check_callable(name: str, value: object) -> None:
    """Refuse what can't be called.

    Raises:
        TypeError: it can't.
    """
    if not callable(value):
        raise TypeError(f"{name} is {_shown(value)}: something that can be called is accepted")


def check_duration(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Refuse what is no time that passes.

    Raises:
        TypeError: no ``timedelta``.
        ValueError: negative, or zero where that makes no sense.
    """
    if not isinstance(value, timedelta):
        hint = f", like timedelta(seconds={value})" if type(value) in (int, float) else ""
        raise TypeError(f"{name} is {_shown(value)}: a datetime.timedelta is accepted{hint}")
    if value < timedelta(0) or (not may_be_zero and not value):
        rule = "zero or more" if may_be_zero else "more than zero"
        raise ValueError(f"{name} is {value.total_seconds():g} s: it must be {rule}")


def check_less(*named: tuple[str, timedelta]) -> None:
    """Refuse durations that do not grow from left to right.

    Raises:
        ValueError: two neighbours are equal or in the wrong order.
    """
    for (name, value), (longer_name, longer) in itertools.pairwise(named):
        if value >= longer:
            raise ValueError(
                f"{name} is {value.total_seconds():g} s and {longer_name} {longer.total_seconds():g} s: "
                f"{name} < {longer_name} is required"
            )


def check_count(name: str, value: object, least: int) -> None:
    """Refuse what is neither None nor a whole number from ``least`` on.

    Raises:
        TypeError: no ``int``.
        ValueError: too low.
    """
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {_shown(value)}: an int or None is accepted")
    if value < least:
        raise ValueError(f"{name} is {value}: {least} or more is accepted")


def check_path(name: str, value: object) -> None:
    """Refuse what is neither None nor a path.

    Raises:
        TypeError: it is something else.
    """
    if value is not None and not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} is {_shown(value)}: a path or None is accepted")


def check_absolute_path(name: str, value: object) -> None:
    """Refuse what is neither None nor an absolute path; it may hold ``{rank}``.

    Raises:
        TypeError: no text.
        ValueError: relative, or with other words in braces.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_shown(value)}: a str or None is accepted")
    if not os.path.isabs(value):
        raise ValueError(f"{name} is {value!r}: an absolute path is accepted")
    try:
        value.format(rank=0)
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{name} is {value!r}: {{rank}} is the only word in braces that is accepted"
        ) from error


def _shown(value: object) -> str:
    text = value.__name__ if isinstance(value, type) else repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"the class {text}" if isinstance(value, type) else f"{text} of type {type(value).__name__}"


def _name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def _is_class(value: object, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)
