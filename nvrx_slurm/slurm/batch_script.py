"""Read the ``#SBATCH`` lines of a batch script as sbatch does.

What sbatch does was read off ``sbatch -vvv --test-only`` of Slurm 22.05: a line counts if it begins with
``#SBATCH`` in its first column, up to the first line that is neither blank nor a comment; quotes are removed;
an unquoted ``#`` ends the line, even within a word; ``hetjob`` begins another component.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nvrx_slurm.slurm.sbatch_options import LONG, SHORT, Takes, long_option

_MAGIC = "#SBATCH"
_OLD_MAGIC = "#SLURM"
_NEXT_COMPONENT = ("hetjob", "packjob")


class DirectiveError(ValueError):
    """sbatch refuses the line; the message says why."""


@dataclass(frozen=True)
class SbatchOption:
    """One option of the script."""

    name: str
    """Its long name."""
    value: str | None
    line: int
    text: str
    """The whole line."""


@dataclass(frozen=True)
class Trouble:
    """A line that sbatch does not read as it was meant."""

    line: int
    text: str
    what: str


@dataclass
class BatchScript:
    """A batch script as sbatch sees it."""

    lines: list[str]
    options: list[SbatchOption] = field(default_factory=list)
    refused: list[Trouble] = field(default_factory=list)
    """sbatch does not accept the script because of these."""
    unknown: list[Trouble] = field(default_factory=list)
    """Options that sbatch has not; a site's plug-in may add them."""
    ignored: list[Trouble] = field(default_factory=list)
    """Lines that look like options and are none."""
    cut: list[Trouble] = field(default_factory=list)
    """An unquoted ``#`` within a word."""
    old_magic: list[Trouble] = field(default_factory=list)
    components: list[Trouble] = field(default_factory=list)
    """Where further components of a heterogeneous job begin."""
    body_from: int = 0
    """Index of the first command line."""

    def last(self, *names: str) -> SbatchOption | None:
        """Return the option that counts: the last one given under any of these names."""
        found = [option for option in self.options if option.name in names]
        return found[-1] if found else None


def parse_batch_script(text: str) -> BatchScript:
    """Read a script."""
    lines = text.splitlines()
    script = BatchScript(lines=lines, body_from=len(lines))
    for index, line in enumerate(lines):
        number = index + 1
        if line.startswith(_MAGIC):
            _read_directive(script, number, line, line[len(_MAGIC) :])
        elif line.startswith(_OLD_MAGIC):
            script.old_magic.append(Trouble(number, line, "#SLURM"))
            _read_directive(script, number, line, line[len(_OLD_MAGIC) :])
        elif line.strip() and not line.lstrip().startswith("#"):
            script.body_from = index
            break
        elif _looks_like_directive(line):
            script.ignored.append(Trouble(number, line, "#SBATCH is not in the first column of the line"))
    for index in range(script.body_from, len(lines)):
        if lines[index].startswith(_MAGIC):
            what = f"it comes after the first command, in line {script.body_from + 1}"
            script.ignored.append(Trouble(index + 1, lines[index], what))
    return script


def _looks_like_directive(line: str) -> bool:
    stripped = line.strip()
    # "##SBATCH" is how people switch a line off.
    return stripped.startswith("#") and stripped[1:].lstrip().startswith("SBATCH -")


def _read_directive(script: BatchScript, number: int, line: str, rest: str) -> None:
    try:
        words = split_words(rest)
    except DirectiveError as error:
        script.refused.append(Trouble(number, line, str(error)))
        return
    if words and words[0].text in _NEXT_COMPONENT:
        script.components.append(Trouble(number, line, words[0].text))
        return
    if any(word.cut for word in words):
        script.cut.append(Trouble(number, line, words[-1].text))
    try:
        for name, value in _options(iter(words)):
            if name in LONG:
                script.options.append(SbatchOption(name, value, number, line))
            else:
                script.unknown.append(Trouble(number, line, name))
    except DirectiveError as error:
        script.refused.append(Trouble(number, line, str(error)))


@dataclass(frozen=True)
class Word:
    """One argument of a directive."""

    text: str
    cut: bool = False
    """An unquoted ``#`` ended it."""


def split_words(rest: str) -> list[Word]:
    """Split what follows ``#SBATCH`` as sbatch does.

    Raises:
        DirectiveError: a quote is not closed, or a word begins with a colon.
    """
    words: list[Word] = []
    position = 0
    while True:
        while position < len(rest) and rest[position].isspace():
            position += 1
        if position == len(rest) or rest[position] == "#":
            return words
        if rest[position] == ":":
            raise DirectiveError("unexpected ':': components of a heterogeneous job are separated by hetjob")
        text, position, at_hash = _one_word(rest, position)
        words.append(Word(text, at_hash))
        if at_hash:
            return words


def _one_word(rest: str, position: int) -> tuple[str, int, bool]:
    """Return a word, where it ends, and whether a ``#`` ended it."""
    text = ""
    quote = ""
    escaped = False
    while position < len(rest):
        char = rest[position]
        if not quote and char.isspace():
            break
        if escaped:
            text += char
            escaped = False
        elif char == "\\":
            escaped = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                text += char
        elif char in "\"'":
            quote = char
        elif char == "#":
            return text, position, True
        else:
            text += char
        position += 1
    if quote:
        raise DirectiveError(f"a {quote} is not closed")
    return text, position, False


def _options(words: Iterator[Word]) -> Iterator[tuple[str, str | None]]:
    for word in words:
        text = word.text
        if text.startswith("--") and len(text) > 2:
            yield _long(text[2:], words)
        elif text.startswith("-") and len(text) > 1 and text != "--":
            yield from _short(text[1:], words)
        else:
            raise DirectiveError(f"{text!r} is no option: sbatch takes it for an invalid directive")


def _long(typed: str, words: Iterator[Word]) -> tuple[str, str | None]:
    typed, equals, joined = typed.partition("=")
    name = long_option(typed)
    if name is None:
        return f"--{typed}", joined if equals else None
    match LONG[name]:
        case Takes.NOTHING:
            if equals:
                raise DirectiveError(f"--{name} takes no value")
            return name, None
        case Takes.MAYBE:
            return name, joined if equals else None
        case Takes.VALUE:
            return name, joined if equals else _following(f"--{name}", words)


def _short(letters: str, words: Iterator[Word]) -> Iterator[tuple[str, str | None]]:
    """Read ``-N5``, ``-Hc 2``: letters without a value can be joined."""
    for position, letter in enumerate(letters):
        name = SHORT.get(letter)
        rest = letters[position + 1 :]
        if name is None:
            yield f"-{letter}", None
            return
        match LONG[name]:
            case Takes.NOTHING:
                yield name, None
            case Takes.MAYBE:
                yield name, rest or None
                return
            case Takes.VALUE:
                yield name, rest or _following(f"-{letter}", words)
                return


def _following(option: str, words: Iterator[Word]) -> str:
    word = next(words, None)
    if word is None:
        raise DirectiveError(f"{option} needs a value")
    return word.text
