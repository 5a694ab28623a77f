"""Which network adapter is near which GPU: from their places in the PCI tree."""

from __future__ import annotations

from collections.abc import Mapping

_DEVICES = "/sys/devices/"


def common_depth(one: str, other: str) -> int:
    """Return how many bridges two devices share on their way to the processor, by their resolved sysfs paths.

    0: they hang on different root complexes.
    """
    depth = 0
    pairs = zip(one.removeprefix(_DEVICES).split("/"), other.removeprefix(_DEVICES).split("/"), strict=False)
    for mine, theirs in pairs:
        if mine != theirs:
            break
        depth += 1
    return depth


def nearest(gpus: Mapping[int, str], nics: Mapping[str, str]) -> dict[int, tuple[str, ...]]:
    """Return the adapters that share most of the way with each GPU; several that share equally much.

    Args:
        gpus: resolved sysfs path by index.
        nics: the same by device name.
    """
    found = {}
    for gpu, path in gpus.items():
        depths = {nic: common_depth(path, nic_path) for nic, nic_path in nics.items()}
        best = max(depths.values(), default=0)
        found[gpu] = tuple(sorted(nic for nic, depth in depths.items() if depth == best > 0))
    return found
