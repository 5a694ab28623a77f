"""The extension module that ``csrc/cupti`` makes."""

from typing_extensions import Buffer

SKETCH_BYTES: int
"""What the times of one kernel take in memory."""
RELATIVE_ERROR: float
"""Of a median, unless it is ``coarse``."""
MOST_SKETCHES: int
"""So many kernels, times sections, are told apart."""
CHECKED_AGAINST: str
"""The CUPTI API version whose headers the declarations were compared with; empty if there were none."""

def hash_name(name: str) -> int:
    """Return the 64-bit FNV-1a hash of a kernel's name."""

class Times:
    """Of one kernel in one period."""

    min_us: float
    max_us: float
    median_us: float
    """To 1 %."""
    mean_us: float
    deviation_us: float
    """Of the samples themselves."""
    count: int
    coarse: bool
    """The median is less exact, for the times scatter over more than 160 steps of 2 %."""

class KernelTimes:
    """A kernel in one period, and what of it fell into each section."""

    name: str
    hash: int
    times: Times
    sections: list[tuple[int, Times]]

class SyntheticAggregator:
    """The aggregator alone, on the thread that calls it.

    Args:
        distance: bytes from one record to the next.

    Raises:
        ValueError: that is no multiple of 8 from 112.
    """

    def __init__(self, distance: int) -> None: ...
    def read(self, records: Buffer) -> None: ...
    def take(self, is_last: bool = True) -> list[KernelTimes]:
        """End a period; unless it is the last, kernels whose launch is not known yet wait for one more."""

    def counts(self) -> dict[str, int]: ...
    def sketches(self) -> int: ...
    def open(self, section: int, now: int) -> int: ...
    def close(self, opened: int, now: int) -> None: ...

class SyntheticCollector:
    """Buffers, the thread that reads them and an aggregator, with records from Python instead of a driver."""

    def __init__(self, distance: int, buffer_bytes: int = ..., most_buffers: int = ...) -> None: ...
    def feed(self, records: Buffer) -> int:
        """Return how many records found no buffer."""

    def complete_foreign(self, records: Buffer) -> None: ...
    def drain(self, patience_ms: int) -> bool: ...
    def take(self) -> list[KernelTimes]: ...
    def counts(self) -> dict[str, int]: ...

class Activity:
    """CUPTI's activity interface; one per process."""

    @staticmethod
    def open(path: str) -> Activity:
        """Open the library, or return what is open already.

        Raises:
            RuntimeError: it is none, or of a version that is not known.
        """

    def attach(self) -> None:
        """Have CUPTI hand its records to us, at first and after another tool has had it.

        Raises:
            RuntimeError: a profiler holds it, or there is no driver.
        """

    def enter(self, section: int) -> int:
        """Enter a section on this thread; returns what :meth:`leave` is to be given.

        Raises:
            RuntimeError: CUPTI does not record.
        """

    def leave(self, entered: int, is_ours: bool) -> None:
        """Leave it; with ``is_ours`` false, another tool has CUPTI now and nothing is switched off."""

    def release(self) -> None:
        """Have CUPTI hand over what it has recorded and record no more, before another tool takes it."""

    def flush(self, patience_ms: int) -> bool:
        """Ask for the records of kernels that have ended; false if reading them takes longer.

        Raises:
            RuntimeError
        """

    def drain(self, patience_ms: int) -> bool:
        """Wait for the records that were handed over already; false if reading them takes longer."""

    def take(self) -> list[KernelTimes]: ...
    def counts(self) -> dict[str, int]: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int: ...
