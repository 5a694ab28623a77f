"""What can come out of a wrapped function besides the function's own exceptions, and what interrupts it."""

from __future__ import annotations


class RestartError(Exception):
    """An error of in-process restart itself: this rank leaves, the others go on."""


class HealthCheckError(RestartError):
    """This rank is not fit to go on."""


class InternalError(RestartError):
    """Something that should not happen; please report it."""


class TimeoutError(RestartError):
    """A plug-in took longer than it was allowed to."""


class RestartAbort(BaseException):
    """Nobody restarts any more: every rank leaves."""


class RankShouldRestart(BaseException):
    """Interrupts the wrapped function so that it is called again; it may raise it itself to ask for that.

    Not an ``Exception``, so that the ``except Exception`` of a training loop lets it pass.
    """
