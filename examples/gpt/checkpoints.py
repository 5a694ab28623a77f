"""Checkpoints that are whole or absent, whenever the writer is killed.

A file gets its final name only after its content is on disk, and it ends with a digest of that content.
So a torn file is never taken for a checkpoint: the newest one that verifies is used.
"""

import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

KEPT = 2  # the newest, and the one before it in case the newest turns out to be unreadable
PATTERN = "step_*.pt"


class Unreadable(Exception):
    """The file is not a whole checkpoint."""


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.pt"


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of this step and remove all but the newest two. For one writer per folder."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path = path_of(folder, step)
    _write_atomically(path, content + hashlib.sha256(content).digest())
    for old in sorted(folder.glob(PATTERN))[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint into CPU memory; `Unreadable` unless it is exactly what was saved."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Unreadable(error.strerror) from error
    size = hashlib.sha256().digest_size
    content, digest = content[:-size], content[-size:]
    if hashlib.sha256(content).digest() != digest:
        raise Unreadable("its content does not match its digest, so it was cut short or altered")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load_newest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest readable checkpoint and its step; says which newer ones it had to skip."""
    for path in sorted(folder.glob(PATTERN), reverse=True):
        try:
            return int(path.stem.removeprefix("step_")), load(path)
        except Unreadable as why:
            print(f"skipping checkpoint {path}: {why}", flush=True)
    return None


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed writer left half-written. Only for the folder's one writer."""
    for path in folder.glob(f".{PATTERN}.*"):
        path.unlink(missing_ok=True)


def _write_atomically(path: Path, content: bytes) -> None:
    # In the same directory, so that the rename cannot cross file systems; mkstemp makes it mode 0600.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    # The new name itself is on disk only once its directory is.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
