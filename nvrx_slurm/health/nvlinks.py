"""A GPU's NVLinks."""

from __future__ import annotations

from nvrx_slurm.health.nvml import NOT_THERE, Nvml, NvmlCode, NvmlError

MOST_LINKS = 36
"""``NVML_NVLINK_MAX_LINKS``."""


def active_links(nvml: Nvml, gpu: int) -> tuple[list[int], dict[int, NvmlError]]:
    """Return the links that are up, and why others can't be read.

    Raises:
        NvmlError: the GPU has no NVLink, or does not answer.
    """
    active: list[int] = []
    unreadable: dict[int, NvmlError] = {}
    for link in range(MOST_LINKS):
        try:
            if nvml.nvlink_active(gpu, link):
                active.append(link)
        except NvmlError as error:
            # The driver has no other way to say how many links there are.
            if error.code in (*NOT_THERE, NvmlCode.INVALID_ARGUMENT):
                if link == 0:
                    raise NvmlError(NvmlCode.NOT_SUPPORTED) from error
                break
            if error.code in (NvmlCode.GPU_IS_LOST, NvmlCode.RESET_REQUIRED):
                raise
            unreadable[link] = error
    return active, unreadable
