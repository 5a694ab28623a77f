"""What may be asked of any exception, whatever code its class brings along."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

from nvrx_slurm.inprocess.exception import RankShouldRestart
from nvrx_slurm.supervisor import messages as msg

_MOST_LOGGED = 100_000
"""Characters of an exception's text; a rank may restart often."""


def summary(error: BaseException | None) -> str:
    """Return type and message; nothing that an exception's own code does wrong comes out."""
    if error is None:
        return ""
    # Of the type alone, for isinstance and type(error).__name__ may run code of the exception's.
    kind: Any = type(error)
    is_restart = issubclass(kind, RankShouldRestart)
    name = "RankShouldRestart" if is_restart else vars(type)["__name__"].__get__(kind)
    try:
        text = f"{name}: {error!s}".removesuffix(": ")
    except BaseException:
        text = name
    # It may hold what has no UTF-8.
    return text[: msg.MAX_WHY].encode(errors="replace").decode()


def exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return ``error`` as ``logging`` takes it; without its text, if that would flood a log."""
    kind, traceback_ = type(error), _own(error, "__traceback__")
    try:
        is_long = len(str(error)) > _MOST_LOGGED
    except BaseException:
        is_long = False
    if is_long:
        return RuntimeError, RuntimeError(f"{summary(error)} …"), traceback_
    return kind, error, traceback_


def drop_locals(error: BaseException | None) -> None:
    """Let go of what the frames of the interrupted function hold: models, tensors, process groups."""
    pending = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(_own(one, "__traceback__"))
            pending += [_own(one, "__cause__"), _own(one, "__context__")]


def _own(error: BaseException, name: str) -> Any:
    """Return an attribute that every exception has, past what its class makes of it."""
    return vars(BaseException)[name].__get__(error)
