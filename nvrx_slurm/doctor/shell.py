"""The commands of a batch script's body: enough of the shell's grammar to find one and what is around it.

Nothing is expanded; a word that holds ``$`` or a backquote keeps it, and is *open*: its value is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"\\]?)(\w+)")
_OPERATOR = re.compile(r"&>>?|>&|<&|\d*[<>]+[&|]?|&&|\|\||;;|[;&|()]")
_KEYWORDS = frozenset(["if", "then", "else", "elif", "do", "while", "until", "time", "!", "{"])
_END_KEYWORDS = frozenset(["fi", "done", "esac", "}"])
_CLOSING = {"(": ")", "{": "}"}


@dataclass
class Command:
    """One simple command."""

    line: int
    words: list[str] = field(default_factory=list)
    ended_by: str = ""
    """The operator after it: ``&``, ``|``, ``&&``, ``||``, ``;``, or nothing."""

    @property
    def plain(self) -> Sequence[str]:
        """The words without variables set for this command only, and without keywords."""
        words = self.words
        while words and (_ASSIGNMENT.match(words[0]) or words[0] in _KEYWORDS):
            words = words[1:]
        return words

    def position_of(self, program: str) -> int | None:
        """Return where ``program`` stands in :attr:`plain`, by whatever path it is called."""
        for position, word in enumerate(self.plain):
            if word == program or word.endswith(f"/{program}"):
                return position
        return None


def is_open(word: str) -> bool:
    """Tell whether the shell would replace something in the word."""
    return "$" in word or "`" in word


def commands(lines: Sequence[str], first: int = 0) -> list[Command]:
    """Return the simple commands from index ``first`` on, in order; an unfinished quote ends the last one."""
    found = [
        command for command in _split(_Lexer("\n".join(lines[first:]), first + 1).tokens()) if command.plain
    ]
    return [command for command in found if command.plain[0] not in _END_KEYWORDS]


def _split(tokens: Iterator[_Token]) -> Iterator[Command]:
    command: Command | None = None
    redirected = False
    for token in tokens:
        if token.operator and ("<" in token.text or ">" in token.text):
            redirected = True
        elif token.operator:
            redirected = False
            if command is not None:
                command.ended_by = token.text.strip("\n")
                yield command
                command = None
        elif redirected:
            redirected = False
        else:
            command = command or Command(token.line)
            command.words.append(token.text)
    if command is not None:
        yield command


@dataclass(frozen=True)
class _Token:
    text: str
    line: int
    operator: bool = False


class _Lexer:
    """Splits a script into words and operators."""

    def __init__(self, text: str, line: int) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._ends: list[str] = []
        """Of the here documents that begin after this line."""

    def tokens(self) -> Iterator[_Token]:
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "\n":
                yield _Token("\n", self._line, operator=True)
                self._take(1)
                self._skip_here_documents()
            elif char.isspace():
                self._take(1)
            elif self._text.startswith("\\\n", self._at):
                self._take(2)
            elif char == "#":
                self._take(self._until("\n", self._at) - self._at)
            elif (heredoc := _HEREDOC.match(self._text, self._at)) is not None:
                self._ends.append(heredoc.group(3))
                self._take(len(heredoc.group(0)) + len(heredoc.group(2)))
            elif (operator := _OPERATOR.match(self._text, self._at)) is not None:
                yield _Token(operator.group(), self._line, operator=True)
                self._take(len(operator.group()))
            else:
                line = self._line
                yield _Token(self._word(), line)

    def _word(self) -> str:
        word = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char.isspace() or char in ";&|()<>":
                break
            if char == "\\":
                word += self._take(2)[1:].strip("\n")
            elif char in "'\"`":
                word += self._quoted(char)
            elif char == "$" and self._text[self._at + 1 : self._at + 2] in _CLOSING:
                word += self._nested()
            else:
                word += self._take(1)
        return word

    def _quoted(self, quote: str) -> str:
        end = self._at + 1
        while end < len(self._text) and self._text[end] != quote:
            end += 2 if self._text[end] == "\\" and quote != "'" else 1
        inner = self._take(end + 1 - self._at)[1:-1]
        if quote == "`":
            return f"`{inner}`"
        # A dollar in single quotes stays one; nothing that is looked for needs one.
        return inner if quote == "'" else inner.replace('\\"', '"').replace("\\\n", "")

    def _nested(self) -> str:
        """Take ``$(…)`` or ``${…}``, whatever is in it."""
        opening = self._text[self._at + 1]
        depth, end = 0, self._at + 1
        while end < len(self._text):
            depth += (self._text[end] == opening) - (self._text[end] == _CLOSING[opening])
            end += 1
            if depth == 0:
                break
        return self._take(end - self._at)

    def _take(self, number: int) -> str:
        taken = self._text[self._at : self._at + number]
        self._at += number
        self._line += taken.count("\n")
        return taken

    def _until(self, what: str, start: int) -> int:
        found = self._text.find(what, start)
        return len(self._text) if found < 0 else found

    def _skip_here_documents(self) -> None:
        while self._ends:
            end = self._ends.pop(0)
            while self._at < len(self._text):
                line_end = self._until("\n", self._at)
                line = self._text[self._at : line_end]
                self._take(line_end + 1 - self._at)
                if line.strip() == end:
                    break
