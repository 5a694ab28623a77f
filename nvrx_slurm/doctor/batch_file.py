"""A batch script, read: sbatch's options, the shell's commands, and the nvrx-srun line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.doctor.launch import Launch, Launcher, find_launches
from nvrx_slurm.doctor.shell import Command, commands
from nvrx_slurm.slurm.batch_script import BatchScript, SbatchOption, parse_batch_script

_SIGNAL = re.compile(r"(?:([RB]+):)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?")
_SIGNAL_NUMBERS = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT", "1": "HUP"}
_DEFAULT_NOTICE_S = 60
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class UnreadableScriptError(ValueError):
    """The file cannot be checked; the message says why."""


@dataclass(frozen=True)
class JobSignal:
    """``sbatch --signal=B:USR2@120``."""

    option: SbatchOption
    to_shell: bool
    """``B:``: to the batch script; otherwise to the steps, and not to the script."""
    name: str
    notice_s: int


@dataclass(frozen=True)
class BatchFile:
    """What the lint rules look at."""

    script: BatchScript
    commands: tuple[Command, ...]
    launches: tuple[Launch, ...]
    launcher: Launcher
    dos_line_breaks: bool

    def option(self, *names: str) -> SbatchOption | None:
        return self.script.last(*names)

    def line_text(self, line: int) -> str:
        return self.script.lines[line - 1].strip()

    @property
    def signal(self) -> JobSignal | None:
        option = self.option("signal")
        match = _SIGNAL.fullmatch((option.value or "").upper()) if option else None
        if option is None or match is None:
            return None
        where, name, notice = match.groups()
        seconds = _DEFAULT_NOTICE_S if notice is None else int(notice)
        return JobSignal(option, "B" in (where or ""), _SIGNAL_NUMBERS.get(name, name), seconds)

    @property
    def num_nodes(self) -> int | None:
        """How many nodes the script asks for at least; None when it does not say."""
        option = self.option("nodes")
        match = re.match(r"\d+", option.value or "") if option else None
        return int(match.group()) if match else None

    @property
    def time_limit_s(self) -> float | None:
        """``--time``; None when the script does not say."""
        option = self.option("time")
        return None if option is None else parse_time(option.value or "")


def read_batch_file(path: Path, launcher: Launcher) -> BatchFile:
    """Read the script at ``path``.

    Raises:
        UnreadableScriptError
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableScriptError(f"{path}: {error.strerror}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableScriptError(f"{path} is no text, or not in UTF-8: {error.reason}") from error
    if "\0" in text:
        raise UnreadableScriptError(f"{path} is no text: it holds a zero byte, which sbatch refuses")
    return parse_batch_file(text, launcher)


def parse_batch_file(text: str, launcher: Launcher) -> BatchFile:
    """Read a script's text."""
    unix = text.replace("\r\n", "\n")
    script = parse_batch_script(unix)
    found = commands(script.lines, script.body_from)
    return BatchFile(script, tuple(found), tuple(find_launches(found, launcher)), launcher, unix != text)


def parse_time(text: str) -> float | None:
    """Return the seconds of a time limit as sbatch(1) writes it; infinity for none, None if it is none of it.

    ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours``, ``days-hours:minutes``,
    ``days-hours:minutes:seconds``.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return math.inf
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
