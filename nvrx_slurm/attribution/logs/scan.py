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

from nvrx_slurm.attribution.logs import progress
from nvrx_slurm.attribution.logs.finding import MAX_EXCERPT, MAX_RANKS, Finding, Source, SourceKind
from nvrx_slurm.attribution.logs.flood import DIGITS_DECIDE, Flood, Signatures, flood_of
from nvrx_slurm.attribution.logs.prefix import Claim, Prefix, claims, parse_prefix, rank_at_once
from nvrx_slurm.attribution.logs.reading import open_log
from nvrx_slurm.attribution.logs.rules import Family, Role, Rule, RuleSet, clip
from nvrx_slurm.attribution.logs.shape import shape
from nvrx_slurm.attribution.logs.traceback import HEADER, Part, Raised, Tracebacks
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
_SUMMARY_RANK = re.compile(r"^\s{0,8}rank\s{0,12}: ?(\d{1,7}) \(local_rank")
_SUMMARY = re.compile(r"^\s{0,8}(?:exitcode|traceback)\s{0,12}:")
_SUMMARY_LINES = 6
_FLOOD = 256
"""So many messages of one kind are looked at one by one."""
_FEW = 8
"""So many, where a line's rank can be told without taking it apart, and progress does not clear the kind."""
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


class _Harmless:
    """No line of this skeleton is a failure or progress."""


class _Marks:
    """Lines of this skeleton tell progress: the last of them counts."""


class _Healed:
    """A line of this skeleton tells of a restart in process."""


class _Checked:
    """Digits may decide what a line of this skeleton is."""


class _Begins:
    """A line of this skeleton begins a traceback."""


_HARMLESS, _MARKS, _HEALED, _CHECKED, _BEGINS = _Harmless(), _Marks(), _Healed(), _Checked(), _Begins()
_Kind = _Harmless | _Marks | _Healed | _Checked | _Begins | Flood
_Parts = Part | _Begins | dict[str, Flood]
"""What a line is to a traceback: part of one, its header, or its end, by where the exception was raised."""


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
        self._parts: dict[bytes, _Parts] = {}
        self._last_mark: tuple[bytes, int] | None = None
        self._words: set[bytes] = set()
        self._telling: set[bytes] = set()
        self._signatures = Signatures()
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
        number, kinds, unfinished = self.scan.lines + 1, self._kinds, self._tracebacks.unfinished
        for at, skeleton in enumerate(skeletons):
            if unfinished and self._in_traceback(lines[at], skeleton, number + at):
                continue
            kind = kinds.get(skeleton)
            if kind is _HARMLESS:
                continue
            if kind is _MARKS:
                self._last_mark = (lines[at], number + at)
                continue
            if kind is _BEGINS:
                self._tracebacks.begin(self._rank_at_once(lines[at]), number + at)
                continue
            if type(kind) is Flood and self._flooded(kind, lines[at], number + at):
                continue
            self._line(lines[at], skeleton, kind, number + at)
        self.scan.lines += len(lines)
        self._settle()

    def _in_traceback(self, raw: bytes, skeleton: bytes, number: int) -> bool:
        """Offer a line to the tracebacks that have begun; tell whether one took it."""
        part = self._parts.get(skeleton)
        if part is not None:
            rank = self._rank_at_once(raw)
            if type(part) is Part and part.is_of(raw):
                taken = self._tracebacks.take_part(rank, part)
                if taken is not None:
                    return taken
            elif part is _BEGINS:
                self._tracebacks.begin(rank, number)
                return True
            elif isinstance(part, dict) and self._ends_alike(part, rank, raw, number):
                return True
        if len(raw) > _MAX_LINE:
            raw = raw[: _MAX_LINE // 2] + raw[-_MAX_LINE // 4 :]
        return self._continues_traceback(raw, skeleton, number)

    def _ends_alike(self, ends: dict[str, Flood], rank: int | None, raw: bytes, number: int) -> bool:
        """Tell whether the line ends a traceback as lines of its skeleton have before, and count it then."""
        where = self._tracebacks.frame_of(rank)
        flood = ends.get(where) if where is not None else None
        if flood is None or not self._flooded(flood, raw, number):
            return False
        self._tracebacks.close(rank)
        return True

    def _rank_at_once(self, raw: bytes) -> int | None:
        return self.scan.source.rank if self.scan.source.rank is not None else rank_at_once(raw)

    def _line(self, raw: bytes, skeleton: bytes, kind: _Kind | None, number: int) -> None:
        if len(raw) > _MAX_LINE:
            raw = raw[: _MAX_LINE // 2] + raw[-_MAX_LINE // 4 :]
            skeleton = _skeleton(raw)
        if kind is None:
            kind = self._judge(raw, skeleton)
            if len(skeleton) <= _MAX_SKELETON:
                if len(self._kinds) >= _MAX_SKELETONS:
                    self._kinds.clear()
                self._kinds[skeleton] = kind
        if kind is _MARKS:
            self._last_mark = (raw, number)
        elif kind is _HEALED:
            self._settle()
            self.scan.progress.heals += 1
        elif kind is not _HARMLESS:
            self._check(raw, skeleton, number)

    def _judge(self, raw: bytes, skeleton: bytes) -> _Kind:
        """Return what the first line of a skeleton shows all of its lines to be."""
        if any(token in skeleton for token in progress.TOKENS):
            text = raw.decode("utf-8", "replace")[-_MAX_LINE:].rpartition("\r")[2].lower()
            if progress.tells_restart(text):
                return _HEALED
            tells = (progress.read_mark(text), progress.read_saved(text), progress.read_loaded(text))
            if any(told is not None for told in tells) and not _is_bad(skeleton):
                return _MARKS
        return _CHECKED if self._tells(skeleton) else _HARMLESS

    def _tells(self, skeleton: bytes) -> bool:
        """Tell whether any word can be part of a failure; words that cannot are remembered."""
        words = skeleton.split()
        if not self._telling.isdisjoint(words):
            return True
        if self._words.issuperset(words):
            return False
        if len(self._words) + len(self._telling) > _MAX_WORDS:
            self._words.clear()
            self._telling.clear()
        new = [word for word in words if word not in self._words]
        if is_telling(b" ".join(new)):
            self._telling.update(word for word in new if len(word) <= _MAX_WORD and is_telling(word))
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
        if prefix.rank is None and self._is_summary(number) and _SUMMARY.match(prefix.text):
            prefix = dataclasses.replace(prefix, rank=self._summary[0])
        rank = self._rank(prefix)
        if _HEADER in skeleton:
            self._tracebacks.begin(rank, number)
            if self._remember(raw, skeleton, rank, _BEGINS):
                self._kinds[skeleton] = _BEGINS
            return
        rule = self._rule_of(skeleton, prefix)
        if rule is None or rule.family.role is Role.BENIGN:
            if not DIGITS_DECIDE.search(skeleton) and len(skeleton) <= _MAX_SKELETON:
                self._kinds[skeleton] = _HARMLESS
            return
        of_job = self._of_job(whole)
        if of_job is False:
            return
        finding = self._found(rule.family, prefix, whole, number)
        finding.of_job = of_job is not None or not self.scan.source.job
        few = not rule.family.transient and self._rank_at_once(raw) == rank and not self._is_summary(number)
        if finding.count > (_FEW if few else _FLOOD) and self._may_flood(skeleton):
            flood = self._kinds.get(skeleton)
            if isinstance(flood, Flood) and flood.finding is finding:
                flood.learn(raw, self._signatures)
            else:
                self._kinds[skeleton] = flood_of(finding, raw, skeleton, self._signatures)

    def _may_flood(self, skeleton: bytes) -> bool:
        return len(skeleton) <= _MAX_SKELETON and not self.scan.source.job

    def _is_summary(self, number: int) -> bool:
        return number - self._summary[1] <= _SUMMARY_LINES

    def _flooded(self, flood: Flood, raw: bytes, number: int) -> bool:
        """Count a line of the flood's skeleton that can only lead to its finding."""
        if self._last_mark is not None:
            self._settle()
        if not flood.takes(raw, self.scan.progress.epoch, self._signatures):
            return False
        finding = flood.finding
        finding.count += 1
        finding.last_line = number
        if len(finding.ranks) < MAX_RANKS:
            rank = self._rank_at_once(raw)
            if rank is not None:
                finding.ranks.add(rank)
        return True

    def _of_job(self, line: str) -> bool | None:
        """Tell whether a line of Slurm's names the source's job; None: it names no job, or all count."""
        job = self.scan.source.job
        named = {found.group(1) or found.group(2) for found in _JOB.finditer(line)} if job else set()
        return job in named if named else None

    def _rule_of(self, skeleton: bytes, prefix: Prefix) -> Rule | None:
        numbers = tuple(_SMALL.findall(prefix.text)[:8]) if DIGITS_DECIDE.search(skeleton) else ()
        key = (skeleton[:_MAX_SKELETON], numbers)
        if key in self._matched:
            return self._matched[key]
        rule = self._rules.match_text(prefix.text, prefix.level)
        if len(self._matched) >= _MAX_SKELETONS:
            self._matched.clear()
        self._matched[key] = rule
        return rule

    def _remember(self, raw: bytes, skeleton: bytes, rank: int | None, part: _Parts) -> bool:
        """Remember what lines of a skeleton are to a traceback, if their rank can be told at once."""
        if len(skeleton) > _MAX_SKELETON or self._rank_at_once(raw) != rank:
            return False
        if len(self._parts) >= _MAX_SKELETONS:
            self._parts.clear()
        self._parts[skeleton] = part
        return True

    def _continues_traceback(self, raw: bytes, skeleton: bytes, number: int) -> bool:
        whole = clip(raw.decode("utf-8", "replace"))
        prefix = parse_prefix(whole)
        rank = self._rank(prefix)
        if _HEADER in skeleton:
            self._tracebacks.begin(rank, number)
            self._remember(raw, skeleton, rank, _BEGINS)
            return True
        where = self._tracebacks.frame_of(rank)
        belongs, part, raised = self._tracebacks.take(rank, prefix.text)
        if part is not None:
            self._remember(raw, skeleton, rank, part)
        if raised is not None:
            finding = self._raised(raised, skeleton, prefix, whole, number)
            if finding.count > _FEW and where is not None and self._may_flood(skeleton):
                self._remember_end(raw, skeleton, rank, where, finding)
        return belongs

    def _remember_end(
        self, raw: bytes, skeleton: bytes, rank: int | None, where: str, finding: Finding
    ) -> None:
        known = self._parts.get(skeleton)
        ends = known if isinstance(known, dict) else {}
        flood = ends.get(where)
        if flood is not None and flood.finding is finding:
            flood.learn(raw, self._signatures)
        elif len(ends) < _FLOOD:
            ends[where] = flood_of(finding, raw, skeleton, self._signatures)
        self._remember(raw, skeleton, rank, ends)

    def _raised(self, raised: Raised, skeleton: bytes, prefix: Prefix, whole: str, number: int) -> Finding:
        rule = self._rule_of(skeleton, prefix)
        family = rule.family if rule is not None and rule.family.role is not Role.BENIGN else None
        if family is None:
            family = self._rules.families["code.exception"]
        finding = self._found(family, prefix, whole, number, key=f"{raised.type} {raised.frame}")
        finding.exception, finding.frame = raised.type, raised.frame
        return finding

    def _found(self, family: Family, prefix: Prefix, whole: str, number: int, key: str = "") -> Finding:
        self._settle()
        scan = self.scan
        message = f"{key} {shape(prefix.text)}"
        if self.scan.source.job:
            message = f"{number} {message}"  # of this job are few
        rank, epoch = self._rank(prefix), scan.progress.epoch
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
            epoch=self.scan.progress.epoch,
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
    for block in _blocks(source):
        scanner.feed(block)
    return scanner.finish()


def _blocks(source: Source) -> Iterator[bytes]:
    with open_log(source.path, follow_link=not source.is_run_dirs) as file:
        while block := file.read(BLOCK):
            yield block


_BAD = re.compile(rb"\bnan\b|(?<![a-z])inf\b|infinit|non-?finite|exception|traceback|fail|fatal")


def _is_bad(skeleton: bytes) -> bool:
    """Tell whether a line of progress says that something is wrong as well."""
    found = _BAD.search(skeleton)
    return found is not None and b"nan iterations" not in skeleton[found.start() : found.start() + 16]
