"""Small helpers under the names that NVIDIA's extension has for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def zip_strict(*iterables: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """As ``zip(..., strict=True)``.

    Raises:
        ValueError: they are not equally long.
    """
    return zip(*iterables, strict=True)
