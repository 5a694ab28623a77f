"""A signal that can't be had."""

from __future__ import annotations


class UnavailableError(Exception):
    """The signal is not to be had here: nothing is known, neither good nor bad.

    ``expected`` says that it should be there: the check warns instead of being skipped.
    """

    def __init__(self, why: str, signal: str = "", *, expected: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.signal = signal
        self.expected = expected
