"""Who frees the memory of a storage that is being copied, though somebody still has it, waits for the copy.

FSDP does: ``reshard`` resizes the storages of whole parameters to zero. The storage is there, its memory is
not, and to read that would end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_FREEING = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")
"""What frees a storage's memory: the last two move it, when a tensor first goes to another process."""
_installed = False


def call_before_memory_goes(prepare: Callable[[Any], None]) -> None:
    """Have ``prepare`` called with the storage before Python code frees the memory of one; once for all.

    ``Tensor.resize_`` to a larger size, and operators that do that to their ``out=``, free memory below
    Python, and are not seen.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for name in _FREEING:
        setattr(torch.UntypedStorage, name, _preceded(getattr(torch.UntypedStorage, name), prepare))


def _preceded(method: Any, prepare: Callable[[Any], None]) -> Any:
    @wraps(method)
    def prepared(storage: Any, *arguments: Any, **keywords: Any) -> Any:
        prepare(storage)
        return method(storage, *arguments, **keywords)

    return prepared
