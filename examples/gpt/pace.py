"""How long this rank takes for what it does by itself, so that a slow one is found."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Pace:
    """Measures sections of a step; with an interval of 0 it does nothing."""

    def __init__(self, interval_s: float, stop_if_detected: bool) -> None:
        self._detection: Any = None
        if interval_s > 0:
            from nvrx_slurm.straggler import StragglerDetection

            self._detection = StragglerDetection(interval_s, stop_if_detected=stop_if_detected)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Put into it what this rank does by itself: a section that waits for others shows nothing."""
        if self._detection is None:
            yield
            return
        with self._detection.section(name):
            yield

    def end_step(self) -> bool:
        """Every rank calls it in each step; True, on all of them: a rank is slow for good."""
        return self._detection is not None and self._detection.end_iteration()

    def close(self) -> None:
        if self._detection is not None:
            self._detection.close()
