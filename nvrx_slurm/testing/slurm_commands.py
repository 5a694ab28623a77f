"""Slurm's commands, answered with text that a real one has printed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

_NO_JOB = "Invalid job id specified"
_NO_CONTROLLER = "Unable to contact slurm controller (connect failure)"


class FakeSlurmCommands:
    """Runs nothing: pass it as ``run`` to a client of :mod:`nvrx_slurm.slurm`.

    ``answers`` maps the beginning of a command line to what it prints; the longest that fits counts. An
    exception there is raised. A job that is not there is unknown; to all
    other questions the controller does not answer.
    """

    def __init__(self, answers: Mapping[str, str | Exception]) -> None:
        self.answers = dict(answers)
        self.asked: list[str] = []
        """Every command line, in order."""

    def __call__(self, argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(argv)
        self.asked.append(line)
        fitting = [beginning for beginning in self.answers if line.startswith(beginning)]
        if not fitting:
            why = _NO_JOB if "show job" in line else _NO_CONTROLLER
            return subprocess.CompletedProcess(argv, 1, "", f"slurm_load error: {why}\n")
        answer = self.answers[max(fitting, key=len)]
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(argv, 0, answer, "")
