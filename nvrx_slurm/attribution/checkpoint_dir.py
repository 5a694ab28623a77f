"""How far a job's checkpoints have come, as their directory shows it, whatever framework wrote them."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
"""Written when a save is complete: by Megatron-LM, by DeepSpeed."""
_MARKERS = (".metadata", "metadata.json", "trainer_state.json")
"""Written last into a checkpoint's directory: by torch.distributed.checkpoint, Megatron-LM, transformers."""
_FILES = (".pt", ".pth", ".ckpt", ".safetensors")
_STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt)[-_=]{0,2}(\d{1,15})", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,15})\s*$")
_MAX_ENTRIES = 100_000
_MAX_TRACKER = 4096


def newest_checkpoint(directory: Path) -> int | None:
    """Return the step of the newest checkpoint that is complete; None: there is none whose name tells it.

    A tracker file is believed; without one the highest number counts of a directory with the file that its
    framework writes last, or of a single file. Hidden names and such as ``….tmp`` are being written.

    Raises:
        OSError: the directory cannot be read.
    """
    steps: list[int] = []
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if entry.name in _TRACKERS and entry.is_file(follow_symlinks=False):
                told = _NUMBER.search(_beginning(Path(entry.path)))
                if told:
                    return int(told.group(1))
            if count >= _MAX_ENTRIES:
                break
            found = _STEP.findall(entry.name)
            if found and _is_complete(entry):
                steps.append(int(found[-1]))
    return max(steps, default=None)


def _is_complete(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith("."):
        return False
    if entry.is_dir(follow_symlinks=False):
        return any(os.path.isfile(os.path.join(entry.path, marker)) for marker in _MARKERS)
    return entry.name.endswith(_FILES) and entry.is_file(follow_symlinks=False)


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_TRACKER).decode("utf-8", "replace")
