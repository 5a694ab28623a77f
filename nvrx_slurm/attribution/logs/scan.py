"""One pass over a log, in bounded memory and time linear in its length.

Most lines of a training log repeat others but for numbers. A line's skeleton, its lower-case bytes without
digits, is judged once; every later line of that skeleton costs a dictionary look-up. Only what may be a
failure or progress is decoded and matched.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm.attribution.logs import progress
from nvrx_slurm.attribution.logs.finding import MAX_EXCERPT, MAX_RANKS, Finding, Source, SourceKind
from nvrx_slurm.attribution.logs.prefix import Claim, Prefix, claims, parse_prefix
from nvrx_slurm.attribution.logs.rules import Family, Role, Rule, RuleSet, clip
from nvrx_slurm.attribution.logs.shape import shape
from nvrx_slurm.attribution.logs.traceback import HEADER, Raised, Tracebacks
from nvrx_slurm.attribution.logs.triggers import is_telling

BLOCK = 1 << 20
_MAX_LINE = 1 << 16
_MAX_SKELETONS = 40_000
_MAX_SKELETON = 2048
_MAX_WORDS = 100_000
_MAX_WORD = 64
_MAX_FINDINGS = 2_000
_DIGITS = b"0123456789"
_LOWER = bytes(range(256)).lower()
_HEADER = HEADER.encode()
_DIGITS_DECIDE = re.compile(
    rb"xid|status|exit|errno|signal|code|http|completion|returned|error \(|error-?\s*\W? ?$"
)
_DECISIVE = re.compile(
    rb"(?:status|exit|errno|signal|code|http|error|completion|returned)\D{0,24}(\d{1,6})", re.I
)
_NUMBER = re.compile(rb"([0-9]+)")
_DECIDING, _ANY_NUMBER = rb"([0-9]{1,6})[0-9]*", rb"[0-9]+"
_SUMMARY_RANK = re.compile(r"^\s{0,8}rank\s{0,12}: ?(\d{1,7}) \(local_rank")
_SUMMARY = re.compile(r"^\s{0,8}(?:exitcode|traceback)\s{0,12}:")
_SUMMARY_LINES = 6
_FLOOD = 256
"""So many messages of one kind are looked at one by one."""
_LOOK = 64
"""Of the rest each such, and after many fewer: they may name other ranks."""
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d{1,12})|waiting (\d{1,12}) ?ms")
_JOB = re.compile(r"\b(?:job|step)_?id[=: ]{1,2}(\d{1,12})|\bjob[ _](\d{1,12})\b", re.I)
_SMALL = re.compile(r"-?\b\d{1,3}\b")


@dataclass
class Scan:
    """What one log holds."""

    source: Source
    findings: list[Finding] = field(default_factory=list)
    progress: progress.Progress = field(default_factory=progress.Progress)
    lines: int = 0
    bytes_read: int = 0
    dropped: int = 0
    """Kinds of messages beyond the number that is kept."""


def _skeleton(data: bytes) -> bytes:
    return data.translate(_LOWER, _DIGITS)


class _Signatures:
    """The numbers of a line that may decide what it is.

    Which of a line's numbers those are follows from what stands between them, and is looked for once.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[bytes, ...], tuple[int, ...]] = {}

    def of(self, raw: bytes) -> tuple[bytes, ...]:
        """Return the first six digits of at most four numbers."""
        parts = _NUMBER.split(raw)
        return tuple([parts[place][:6] for place in self._places_in(parts, raw)])

    def layout(self, raw: bytes) -> re.Pattern[bytes]:
        """Return what matches lines that differ from this one in numbers alone; its groups are :meth:`of`."""
        parts = _NUMBER.split(raw)
        places = self._places_in(parts, raw)
        return re.compile(
            b"".join(
                re.escape(part) if at % 2 == 0 else _DECIDING if at in places else _ANY_NUMBER
                for at, part in enumerate(parts)
            )
        )

    def _places_in(self, parts: list[bytes], raw: bytes) -> tuple[int, ...]:
        between = tuple(parts[::2])
        places = self._places.get(between)
        if places is None:
            if len(self._places) >= _MAX_SKELETONS:
                self._places.clear()
            places = self._places[between] = self._find(raw)
        return places

    @staticmethod
    def _find(raw: bytes) -> tuple[int, ...]:
        starts = {number.start(): 2 * at + 1 for at, number in enumerate(_NUMBER.finditer(raw))}
        found = (starts.get(decisive.start(1)) for decisive in _DECISIVE.finditer(raw))
        return tuple(place for place in found if place is not None)[:4]


class _Harmless:
    """No line of this skeleton is a failure or progress."""


class _Marks:
    """Lines of this skeleton tell progress: the last of them counts."""


class _Checked:
    """Digits may decide what a line of this skeleton is."""


@dataclass
class _Flood:
    """Every line of this skeleton is of one finding; most are only counted."""

    finding: Finding
    signatures: set[tuple[bytes, ...]] | None
    """Numbers that decide, as they were seen to lead to this finding; None: none can."""
    layout: re.Pattern[bytes]
    """Of most of these lines."""
    seen: int = 0


_Kind = _Harmless | _Marks | _Checked | _Flood
_HARMLESS, _MARKS, _CHECKED = _Harmless(), _Marks(), _Checked()


class LogScanner:
    """Scans one log as it is fed; :attr:`scan` is valid after every :meth:`feed`."""

    def __init__(self, source: Source, rules: RuleSet) -> None:
        self.scan = Scan(source)
        self._rules = rules
        self._carry = b""
        self._kinds: dict[bytes, _Kind] = {}
        self._matched: dict[tuple[bytes, tuple[str, ...]], Rule | None] = {}
        self._findings: dict[tuple[str, str], Finding] = {}
        self._tracebacks = Tracebacks()
        self._last_mark: tuple[bytes, int] | None = None
        self._words: set[bytes] = set()
        self._signatures = _Signatures()
        self._summary = (-1, -_SUMMARY_LINES)
        """Rank that torchelastic's summary speaks of, and the line that says so."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log; a line is judged when its end has come."""
        self.scan.bytes_read += len(data)
        data = self._carry + data
        whole, newline, self._carry = data.rpartition(b"\n")
        if newline:
            self._lines(whole)
        if len(self._carry) > _MAX_LINE:
            self._shorten()

    def finish(self) -> Scan:
        """Judge the last line, which may have no end, and return the result."""
        if self._carry:
            self._lines(self._carry)
            self._carry = b""
        return self.scan

    def _shorten(self) -> None:
        """Keep of an endless line its last state, or its beginning and its end."""
        before, overwritten, last = self._carry.rpartition(b"\r")
        if overwritten:
            self._marked(before.rpartition(b"\r")[2], self.scan.lines + 1)
            self._carry = last
        if len(self._carry) > _MAX_LINE:
            self._carry = self._carry[: _MAX_LINE // 2] + self._carry[-_MAX_LINE // 4 :]

    def _lines(self, block: bytes) -> None:
        lines = block.split(b"\n")
        skeletons = _skeleton(block).split(b"\n")
        number, kinds, unfinished = self.scan.lines, self._kinds, self._tracebacks.unfinished
        for at, skeleton in enumerate(skeletons):
            kind = kinds.get(skeleton)
            if kind is _HARMLESS and not unfinished:
                continue
            if kind is _MARKS and not unfinished:
                self._last_mark = (lines[at], number + at + 1)
                continue
            if type(kind) is _Flood and not unfinished and self._flooded(kind, lines[at], number + at + 1):
                continue
            self._line(lines[at], skeleton, kind, number + at + 1)
        self.scan.lines += len(lines)
        self._settle()

    def _line(self, raw: bytes, skeleton: bytes, kind: _Kind | None, number: int) -> None:
        if len(raw) > _MAX_LINE:
            raw = raw[: _MAX_LINE // 2] + raw[-_MAX_LINE // 4 :]
            skeleton = _skeleton(raw)
        if self._tracebacks.unfinished and self._continues_traceback(raw, number):
            return
        if kind is None:
            kind = self._judge(raw, skeleton)
            if len(skeleton) <= _MAX_SKELETON:
                if len(self._kinds) >= _MAX_SKELETONS:
                    self._kinds.clear()
                self._kinds[skeleton] = kind
        if kind is _MARKS:
            self._last_mark = (raw, number)
        elif kind is not _HARMLESS:
            self._check(raw, skeleton, number)

    def _judge(self, raw: bytes, skeleton: bytes) -> _Kind:
        """Return what the first line of a skeleton shows all of its lines to be."""
        if any(token in skeleton for token in progress.TOKENS):
            text = raw.decode("utf-8", "replace")[-_MAX_LINE:].rpartition("\r")[2].lower()
            tells = (progress.read_mark(text), progress.read_saved(text), progress.read_loaded(text))
            if any(told is not None for told in tells) and not _is_bad(skeleton):
                return _MARKS
        return _CHECKED if self._tells(skeleton) else _HARMLESS

    def _tells(self, skeleton: bytes) -> bool:
        """Tell whether any word can be part of a failure; words that cannot are remembered."""
        words = skeleton.split()
        if self._words.issuperset(words):
            return False
        if len(self._words) > _MAX_WORDS:
            self._words.clear()
        new = [word for word in words if word not in self._words]
        if is_telling(b" ".join(new)):
            return True
        self._words.update(word for word in new if len(word) <= _MAX_WORD)
        return False

    def _check(self, raw: bytes, skeleton: bytes, number: int) -> None:
        whole = clip(raw.decode("utf-8", "replace"))
        prefix = parse_prefix(whole)
        told = _SUMMARY_RANK.search(prefix.text)
        if told:
            self._summary = (int(told.group(1)), number)
            return
        if (
            prefix.rank is None
            and number - self._summary[1] <= _SUMMARY_LINES
            and _SUMMARY.match(prefix.text)
        ):
            prefix = dataclasses.replace(prefix, rank=self._summary[0])
        rank = self._rank(prefix)
        if _HEADER in skeleton:
            self._tracebacks.begin(rank, number)
            return
        key = (skeleton[:_MAX_SKELETON], tuple(_SMALL.findall(prefix.text)[:8]))
        if key in self._matched:
            rule = self._matched[key]
        else:
            rule = self._rules.match_text(prefix.text, prefix.level)
            if len(self._matched) >= _MAX_SKELETONS:
                self._matched.clear()
            self._matched[key] = rule
        if rule is None or rule.family.role is Role.BENIGN:
            if not _DIGITS_DECIDE.search(skeleton) and len(skeleton) <= _MAX_SKELETON:
                self._kinds[skeleton] = _HARMLESS
            return
        of_job = self._of_job(whole)
        if of_job is False:
            return
        finding = self._found(rule.family, prefix, whole, number)
        finding.of_job = of_job is not None or not self.scan.source.job
        if finding.count > _FLOOD and b"xid" not in skeleton and len(skeleton) <= _MAX_SKELETON:
            flood = self._kinds.get(skeleton)
            if not isinstance(flood, _Flood) or flood.finding is not finding:
                decides = _DIGITS_DECIDE.search(skeleton) is not None
                known: set[tuple[bytes, ...]] | None = set() if decides else None
                flood = self._kinds[skeleton] = _Flood(finding, known, self._signatures.layout(raw))
            if flood.signatures is not None and len(flood.signatures) < _FLOOD:
                flood.signatures.add(self._signatures.of(raw))

    def _flooded(self, flood: _Flood, raw: bytes, number: int) -> bool:
        """Count a line of the flood's skeleton that can only lead to its finding; now and then do not."""
        flood.seen += 1
        if not flood.seen % (_LOOK if flood.seen < _LOOK * _FLOOD else _LOOK * 16):
            return False
        if flood.signatures is not None:
            match = flood.layout.fullmatch(raw)
            if (self._signatures.of(raw) if match is None else match.groups()) not in flood.signatures:
                return False
        flood.finding.count += 1
        flood.finding.last_line = number
        return True

    def _of_job(self, line: str) -> bool | None:
        """Tell whether a line of Slurm's names the source's job; None: it names no job, or all count."""
        job = self.scan.source.job
        named = {found.group(1) or found.group(2) for found in _JOB.finditer(line)} if job else set()
        return job in named if named else None

    def _continues_traceback(self, raw: bytes, number: int) -> bool:
        whole = clip(raw.decode("utf-8", "replace"))
        prefix = parse_prefix(whole)
        rank = self._rank(prefix)
        if HEADER in whole.lower():
            self._tracebacks.begin(rank, number)
            return True
        belongs, raised = self._tracebacks.take(rank, prefix.text)
        if raised is not None:
            self._raised(raised, prefix, whole, number)
        return belongs

    def _raised(self, raised: Raised, prefix: Prefix, whole: str, number: int) -> None:
        rule = self._rules.match_text(prefix.text, prefix.level)
        family = rule.family if rule is not None and rule.family.role is not Role.BENIGN else None
        if family is None:
            family = self._rules.families["code.exception"]
        finding = self._found(family, prefix, whole, number, key=f"{raised.type} {raised.frame}")
        finding.exception, finding.frame = raised.type, raised.frame

    def _found(self, family: Family, prefix: Prefix, whole: str, number: int, key: str = "") -> Finding:
        self._settle()
        scan = self.scan
        message = f"{key} {shape(prefix.text)}"
        if self.scan.source.job:
            message = f"{number} {message}"  # of this job are few
        rank, epoch = self._rank(prefix), scan.progress.advances
        found = self._findings.get((family.id, message))
        if found is None:
            if len(self._findings) >= _MAX_FINDINGS:
                self._forget()
            found = self._findings[family.id, message] = self._new(family, message, prefix, whole, number)
            scan.findings.append(found)
        else:
            found.count += 1
            if found.epoch != epoch:
                found.epoch, found.line, found.ts, found.rank = epoch, number, prefix.ts, rank
                found.excerpt = whole.strip()[:MAX_EXCERPT]
        found.last_line, found.last_ts = number, prefix.ts
        if rank is not None and len(found.ranks) < MAX_RANKS:
            found.ranks.add(rank)
        return found

    def _new(self, family: Family, message: str, prefix: Prefix, whole: str, number: int) -> Finding:
        timeout = _TIMEOUT.search(whole)
        source = self.scan.source
        certain = source.kind is not SourceKind.OUTPUT
        return Finding(
            family=family,
            source=source,
            shape=message,
            excerpt=prefix.text.strip()[:MAX_EXCERPT],
            line=number,
            ts=prefix.ts,
            rank=self._rank(prefix),
            node=source.node or (prefix.node if certain else None),
            claim=Claim.KERNEL if source.kind is SourceKind.KERNEL else claims(whole),
            epoch=self.scan.progress.advances,
            timeout_s=int(timeout.group(1) or timeout.group(2)) / 1000 if timeout else None,
        )

    def _forget(self) -> None:
        """Make room: what training went on after is the least use."""
        oldest = min(self._findings.items(), key=lambda item: (item[1].epoch, item[1].family.decides))
        del self._findings[oldest[0]]
        self.scan.findings.remove(oldest[1])
        self.scan.dropped += 1

    def _rank(self, prefix: Prefix) -> int | None:
        return self.scan.source.rank if self.scan.source.rank is not None else prefix.rank

    def _settle(self) -> None:
        """Take the last mark before this point: earlier ones tell nothing more."""
        if self._last_mark is not None:
            raw, number = self._last_mark
            self._last_mark = None
            self._marked(raw, number)

    def _marked(self, raw: bytes, number: int) -> None:
        prefix = parse_prefix(clip(raw[-_MAX_LINE:].decode("utf-8", "replace")))
        text = prefix.text.lower()
        saved, loaded, mark = progress.read_saved(text), progress.read_loaded(text), progress.read_mark(text)
        if saved is not None:
            self.scan.progress.saved(saved, number, prefix.ts)
        elif loaded is not None:
            self.scan.progress.loaded_step = loaded
        elif mark is not None:
            self.scan.progress.see(mark, self._rank(prefix), number, prefix.ts)


def scan_file(source: Source, rules: RuleSet) -> Scan:
    """Scan a whole file.

    Raises:
        OSError: it cannot be read.
    """
    scanner = LogScanner(source, rules)
    for block in _blocks(source.path):
        scanner.feed(block)
    return scanner.finish()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


_BAD = re.compile(rb"\bnan\b|(?<![a-z])inf\b|infinit|non-?finite|exception|traceback|fail|fatal")


def _is_bad(skeleton: bytes) -> bool:
    """Tell whether a line of progress says that something is wrong as well."""
    found = _BAD.search(skeleton)
    return found is not None and b"nan iterations" not in skeleton[found.start() : found.start() + 16]
