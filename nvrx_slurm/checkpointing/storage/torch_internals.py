"""What is used of torch that torch does not promise to keep, and the versions that have it."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import torch

SUPPORTED = "2.8 to 2.13"
"""Versions of torch that checkpoints are made for; the last is the one that they are tested with."""
_LOWEST = (2, 8)


def require(module: str, *names: str) -> Any:
    """Return names of a module of torch's: one, or a tuple of them.

    Raises:
        ImportError: this torch has not all of them, or is too old.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _LOWEST:
        raise ImportError(f"checkpoints need torch {SUPPORTED}, this is {torch.__version__}")
    try:
        found = import_module(module)
        values = tuple(getattr(found, name) for name in names)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"checkpoints need torch {SUPPORTED}; this is {torch.__version__}, which lacks {error}"
        ) from None
    return values[0] if len(values) == 1 else values
