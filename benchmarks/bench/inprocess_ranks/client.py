"""Has scenarios run by ``script.py``, and holds what its ranks told."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("script.py")


@dataclass(frozen=True)
class Rank:
    """What is known of one rank after its end."""

    exit: int
    """Code, or minus the signal."""
    events: list[dict[str, Any]]
    """In its own order; ``t`` is time.monotonic()."""

    def all(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def one(self, event: str) -> dict[str, Any]:
        (found,) = self.all(event)
        return found

    @property
    def entered(self) -> list[int]:
        """Iterations whose function it has begun."""
        return [each["iteration"] for each in self.all("enter")]

    def records(self, iteration: int) -> set[tuple[int, str]]:
        """What ended the iteration before this one."""
        (entry,) = [each for each in self.all("enter") if each["iteration"] == iteration]
        return {(rank, kind) for rank, kind in entry["records"]}


@dataclass(frozen=True)
class Outcome:
    """One scenario."""

    ranks: list[Rank]
    """Those that came in place of others last."""
    hung: list[int]
    """Ranks that had to be killed when the time was over."""
    left_behind: bool
    """A supervisor was still there long after the last rank."""


class Ranks:
    """Runs scenarios one after the other.

    Args:
        directory: for files of the supervisors.
        quiet: keep what ranks log to themselves.
    """

    def __init__(self, directory: Path, *, quiet: bool = True) -> None:
        self._directory = directory
        self._said = open(directory / "stderr", "w+b") if quiet else None  # noqa: SIM115
        environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "error"}
        environ["PYTHONPATH"] = f"{_SCRIPT.parents[3]}:{_SCRIPT.parents[2]}"
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), *(["--quiet"] if quiet else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environ,
        )
        self._count = 0

    def run(self, plan: dict[str, Any], world_size: int, scenario: str, timeout_s: float = 60.0) -> Outcome:
        """Run one scenario.

        Raises:
            TimeoutError: the script itself does not answer.
        """
        self._count += 1
        directory = self._directory / str(self._count)
        directory.mkdir()
        request = {
            "scenario": scenario,
            "world_size": world_size,
            "directory": str(directory),
            "env": plan.pop("env", {}),
            "plan": plan,
            "timeout": timeout_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout_s + 60)[0]:
            raise TimeoutError(f"{_SCRIPT} does not answer")
        answer = json.loads(self._process.stdout.readline())
        return Outcome([Rank(**rank) for rank in answer["ranks"]], answer["hung"], answer["left_behind"])

    def said(self) -> str:
        """Return what quiet ranks have written to standard error so far."""
        assert self._said is not None
        return (self._directory / "stderr").read_text(errors="replace")

    def close(self) -> None:
        """End the script."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._said is not None:
            self._said.close()
