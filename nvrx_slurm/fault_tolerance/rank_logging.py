"""Stamp log records with node, rank, local rank and cycle, for ``logging`` as the program sets it up.

Works under any launcher that sets torchrun's environment, and without one: what is not known is ``-``.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any, TextIO

FORMAT = (
    "%(asctime)s %(levelname)s [%(node)s rank %(rank)s/%(local_rank)s cycle %(cycle)s] %(name)s: %(message)s"
)
"""What :func:`rank_handler` uses; ``rank`` is the global rank, after it stands the one on its node."""
UNKNOWN = "-"


class RankFilter(logging.Filter):
    """Adds ``node``, ``rank``, ``local_rank`` and ``cycle`` to every record, and lets all pass.

    The environment is read once, when the filter is made: a record costs four attributes. What a record has
    already, by ``extra=`` for instance, stays.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """``environ``: in place of this process's own."""
        super().__init__()
        env: Mapping[str, str] = os.environ if environ is None else environ
        node = env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        self._fields: dict[str, Any] = {
            "node": node,
            "rank": env.get("RANK", UNKNOWN),
            "local_rank": env.get("LOCAL_RANK", UNKNOWN),
            "cycle": env.get("TORCHELASTIC_RESTART_COUNT", UNKNOWN),
        }

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__.update({**self._fields, **record.__dict__})
        return True


class RankFormatter(logging.Formatter):
    """A formatter with :data:`FORMAT`, which stamps by itself: for handlers that other code has made."""

    def __init__(self, fmt: str = FORMAT, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(fmt)
        self._stamp = RankFilter(environ)

    def format(self, record: logging.LogRecord) -> str:
        self._stamp.filter(record)
        return super().format(record)


def rank_handler(stream: TextIO | None = None) -> logging.StreamHandler[Any]:
    """Return a handler that writes stamped lines to ``stream``, by default standard error.

    Example::

        logging.basicConfig(level=logging.INFO, handlers=[rank_handler()])
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RankFormatter())
    return handler
