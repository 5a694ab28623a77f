"""The nvrx-srun line of a batch script, read with nvrx-srun's own options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nvrx_slurm.doctor.shell import Command, is_open

PROGRAM = "nvrx-srun"


@dataclass(frozen=True)
class LauncherOption:
    """One option of nvrx-srun, under one of its spellings."""

    name: str
    """The same for all spellings."""
    takes_value: bool
    convert: Callable[[str], object]
    """Raises ValueError, saying what is accepted."""


@dataclass(frozen=True)
class Launcher:
    """What nvrx-srun accepts, by spelling, and what holds if nothing is said."""

    options: Mapping[str, LauncherOption]
    defaults: Mapping[str, object]


@dataclass
class Launch:
    """One nvrx-srun command."""

    command: Command
    before: Sequence[str]
    """Words before ``nvrx-srun``, such as ``exec`` or ``srun -N4``."""
    given: dict[str, list[object]] = field(default_factory=dict)
    """Values by option; those that the shell would put in are missing."""
    open: set[str] = field(default_factory=set)
    """Options whose value only the shell knows."""
    refused: list[str] = field(default_factory=list)
    complete: bool = True
    """False: a word such as ``$OPTIONS`` may hold more options."""

    @property
    def is_exec(self) -> bool:
        return bool(self.before) and self.before[0] == "exec"

    @property
    def background(self) -> bool:
        return self.command.ended_by == "&"

    def value(self, name: str, launcher: Launcher) -> object:
        """Return what nvrx-srun would take; None when only the shell knows (or for no limit)."""
        if self.given.get(name):
            return self.given[name][-1]
        return launcher.defaults.get(name) if self.knows(name) else None

    def knows(self, name: str) -> bool:
        """Tell whether the script alone says what the option's value is."""
        return name not in self.open and (self.complete or name in self.given)


def find_launches(commands: Sequence[Command], launcher: Launcher) -> list[Launch]:
    """Return every command that calls nvrx-srun."""
    found = []
    for command in commands:
        position = command.position_of(PROGRAM)
        if position is not None and command.plain[0] not in ("echo", "command", "which", "type", "["):
            launch = Launch(command, command.plain[:position])
            _read(launch, command.plain[position + 1 :], launcher)
            found.append(launch)
    return found


def _read(launch: Launch, words: Sequence[str], launcher: Launcher) -> None:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            # A path with a variable in it is the script; a variable alone can be anything.
            launch.complete = not (is_open(word) and "/" not in word and "." not in word)
            return
        spelling, equals, joined = word.partition("=")
        option = launcher.options.get(spelling)
        if option is None and not word.startswith("--") and word[:2] in launcher.options:
            option, equals, joined = launcher.options[word[:2]], "=", word[2:]
        if option is None:
            if not is_open(word):
                launch.refused.append(f"nvrx-srun has no option {spelling}")
            return
        if not option.takes_value:
            launch.given.setdefault(option.name, []).append(True)
        elif not equals and not rest:
            launch.refused.append(f"{spelling} needs a value")
        else:
            _take(launch, option, spelling, joined if equals else rest.pop(0))
    if not launch.refused:
        launch.refused.append("no training script is given")


def _take(launch: Launch, option: LauncherOption, spelling: str, text: str) -> None:
    if is_open(text):
        launch.open.add(option.name)
        return
    try:
        launch.given.setdefault(option.name, []).append(option.convert(text))
    except ValueError as error:
        launch.refused.append(f"{spelling}: {error}")
