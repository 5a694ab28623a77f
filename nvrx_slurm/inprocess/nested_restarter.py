"""Log lines by which a launcher around the job sees what in-process restart does.

``[NestedRestarter] name=[InProcess] state=handling stage=starting``, from one rank, on standard output.
"""

from __future__ import annotations

import logging
import sys

from nvrx_slurm.inprocess.abort import Abort
from nvrx_slurm.inprocess.completion import Completion
from nvrx_slurm.inprocess.initialize import Initialize
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.inprocess.terminate import Terminate

LOGGER = "InprocessRestarter.Restarter"


class _Stdout(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is standard output at that moment."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(logging.Formatter("[%(asctime)s] [ALWAYS] [%(name)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _logger() -> logging.Logger:
    logger = logging.getLogger(LOGGER)
    if not logger.handlers:
        logger.addHandler(_Stdout())
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


class NestedRestarterCallback:
    """Writes one line when called.

    Args:
        restarter_state: after ``state=``.
        restarter_stage: after ``stage=``; left out where None.
        logger: writes it; None: the one that all of them share, to standard output.
        special_rank: the initial rank that writes.
    """

    def __init__(
        self,
        restarter_state: str,
        restarter_stage: str | None = None,
        logger: logging.Logger | None = None,
        special_rank: int = 0,
    ) -> None:
        self.restarter_state = restarter_state
        self.restarter_stage = restarter_stage
        self.logger = logger
        self.special_rank = special_rank

    def __call__(self, state: FrozenState) -> FrozenState:
        if state.initial_rank == self.special_rank:
            stage = f" stage={self.restarter_stage}" if self.restarter_stage is not None else ""
            logger = self.logger if self.logger is not None else _logger()
            logger.info(f"[NestedRestarter] name=[InProcess] state={self.restarter_state}{stage}")
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """At the start of an iteration: ``initialize`` the first time, then ``handling``, ``completed``."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("initialize", special_rank=special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """At a fault."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("handling", "starting", special_rank=special_rank)


class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """When all ranks are done."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("finalized", special_rank=special_rank)


class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """When this rank leaves."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("aborted", special_rank=special_rank)
