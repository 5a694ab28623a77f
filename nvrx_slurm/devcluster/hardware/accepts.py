"""What may stand behind the path of a fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nvrx_slurm.health.nvml import NvmlCode

_MOST = 10**15


class Accepts(Protocol):
    """One kind of value."""

    @property
    def syntax(self) -> str:
        """How it is written, with the sign before it."""
        ...

    def takes(self, has_value: bool, adds: bool, value: str) -> bool:
        """Whether this may be written."""
        ...

    def stored(self, value: str, before: str) -> str:
        """Return what is kept; ``before`` is what there was, if ``value`` is added to it."""
        ...


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


class Nothing:
    """The path alone."""

    syntax = ""

    def takes(self, has_value: bool, adds: bool, value: str) -> bool:
        return not has_value

    def stored(self, value: str, before: str) -> str:
        return "1"


class Number:
    """``=NUMBER`` within limits."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.syntax = f"={least}…{most}"

    def takes(self, has_value: bool, adds: bool, value: str) -> bool:
        return not adds and _is_number(value) and self._least <= int(value) <= self._most

    def stored(self, value: str, before: str) -> str:
        return str(int(value))


class Count:
    """``=COUNT`` or ``+=COUNT``."""

    syntax = "=COUNT or +=COUNT"

    def takes(self, has_value: bool, adds: bool, value: str) -> bool:
        return _is_number(value)

    def stored(self, value: str, before: str) -> str:
        return str(min(int(value) + (int(before) if _is_number(before) else 0), _MOST))


class Words:
    """``=WORD``, and what is kept for each."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self._words = words
        self.syntax = f"={'|'.join(words)}"

    def takes(self, has_value: bool, adds: bool, value: str) -> bool:
        return not adds and value in self._words

    def stored(self, value: str, before: str) -> str:
        return self._words[value]


class AnswerOfNvml:
    """``=CODE``: the name of an error without ``NVML_ERROR_``, its number, ``hang``, or ``ok``."""

    syntax = "=CODE|hang|ok"

    def takes(self, has_value: bool, adds: bool, value: str) -> bool:
        return not adds and (value in ("hang", "ok") or value in NvmlCode.__members__ or self._is_code(value))

    def stored(self, value: str, before: str) -> str:
        if value == "ok":
            return ""
        return str(int(NvmlCode[value])) if value in NvmlCode.__members__ else value

    def _is_code(self, value: str) -> bool:
        return _is_number(value) and 0 < int(value) < 100_000
