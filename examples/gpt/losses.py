"""The loss curve as a file: one JSON line per step, and steps that were done again after a restart twice."""

import json
import os
from pathlib import Path


class LossesDiffer(Exception):
    """A step that was done again gave another loss than the first time."""


class LossFile:
    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(
                self._handle, b"\n"
            )  # the last writer's node died within a line: keep ours apart from it

    def append(self, step: int, loss: float) -> None:
        os.write(self._handle, (json.dumps({"step": step, "loss": loss}) + "\n").encode())

    def close(self) -> None:
        os.close(self._handle)


def read_losses(path: Path) -> dict[int, float]:
    """The loss of each step. Raises `LossesDiffer` if a repeated step is not equal to the last bit."""
    losses: dict[int, float] = {}
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a dying node cut short; its step was done again
        step, loss = entry["step"], entry["loss"]
        if losses.setdefault(step, loss) != loss:
            raise LossesDiffer(f"step {step} of {path} has loss {losses[step]!r} and, done again, {loss!r}")
    return losses
