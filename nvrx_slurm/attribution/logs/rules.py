"""Families of failures: the data file, a site's own, and what family a line belongs to."""

from __future__ import annotations

import enum
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution.logs.patterns import MIN_LITERAL, needed_literals, why_not_linear
from nvrx_slurm.attribution.logs.prefix import LineLevel, parse_prefix
from nvrx_slurm.attribution.site_file import SiteFileError, read_yaml

RULES_VERSION = 1
BUILT_IN = Path(__file__).with_name("families.yaml")
MAX_LINE = 4096
"""Characters of a line that patterns see: its beginning, and the end where an exception says what it is."""
_TAIL = 1024
_MAX_WORDS = 50_000
_MAX_WORD = 64
_XID = (
    r"\bxid(?: \((?:pci:)?[0-9a-f:.]{4,24}\):|(?: (?:error|errors|code|event|id|number))?[ :=#]{1,3})"
    r"\s?\(?(?:%s)\b"
)
_MACRO = re.compile(r"\{xid:([^}]+)\}")


class RulesError(ValueError):
    """A rules file is wrong; the message says where, what, and what is accepted."""


class Role(str, enum.Enum):
    """What a line says about the cause."""

    ROOT = "root"
    SYMPTOM = "symptom"
    """Who waited or died; the cause is elsewhere if anything else is found."""
    CONFIRM = "confirm"
    CASCADE = "cascade"
    """Follows from a fault of another process."""
    WRAPPER = "wrapper"
    """A launcher's report that something failed."""
    BENIGN = "benign"


class Scope(str, enum.Enum):
    """Where the fault lies."""

    GPU = "gpu"
    NODE = "node"
    NETWORK = "network"
    STORAGE = "storage"
    USER_CODE = "user_code"
    CONFIG = "config"
    SCHEDULER = "scheduler"
    EXTERNAL = "external"
    UNKNOWN = "unknown"
    NONE = "none"


class Restart(str, enum.Enum):
    """Whether another try makes sense."""

    YES = "yes"
    BOUNDED = "bounded"
    """One more try without progress."""
    NO = "no"
    DEFER = "defer"
    """This alone decides nothing."""


class Exclude(str, enum.Enum):
    """Whether the node is kept out of the next try."""

    YES = "yes"
    REPEAT = "repeat"
    """After two independent implications."""
    NO = "no"


@dataclass(frozen=True)
class Family:
    """One kind of failure."""

    id: str
    role: Role
    scope: Scope
    restart: Restart
    exclude: Exclude
    says: str
    strength: int = 0
    soft: bool = False
    transient: bool = False

    @property
    def decides(self) -> bool:
        """It may be the primary cause of something."""
        return self.role in (Role.ROOT, Role.SYMPTOM)

    @property
    def of_gpu(self) -> bool:
        """A GPU, or a kernel that ran on one, failed for no reason that lies in the program."""
        return self.scope is Scope.GPU or self.id == "cuda.launch_failure"


UNKNOWN = Family(
    "unknown", Role.SYMPTOM, Scope.UNKNOWN, Restart.YES, Exclude.NO, "nothing that is known to be a failure"
)


@dataclass
class Expression:
    """One pattern as a regular expression; compiled when a line first holds what it needs."""

    text: str
    needs: frozenset[str] | None
    """Every line that it matches holds one of these; None: not known."""
    _compiled: re.Pattern[str] | None = None

    def matches(self, text: str) -> bool:
        if self._compiled is None:
            self._compiled = re.compile(self.text)
        return self._compiled.search(text) is not None


@dataclass(frozen=True)
class Rule:
    """Patterns of one family; several rules may name one family."""

    id: str
    family: Family
    patterns: tuple[str, ...]
    """As written in the file."""
    source: str
    """File that it is from."""
    expressions: tuple[Expression, ...]


class RuleSet:
    """Rules in order; the first that matches decides."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.families = {rule.family.id: rule.family for rule in rules}
        self._tries = [(rule, expression) for rule in rules for expression in rule.expressions]
        self._always = [at for at, (_, expression) in enumerate(self._tries) if expression.needs is None]
        self._by_literal: dict[str, list[int]] = defaultdict(list)
        for at, (_, expression) in enumerate(self._tries):
            for literal in expression.needs or ():
                self._by_literal[literal].append(at)
        self._by_part: dict[str, list[tuple[str, str]]] = defaultdict(list)
        """Literals with their longest word, by the three letters of it that fewest others have."""
        longest = {literal: max(literal.split(), key=len, default=literal) for literal in self._by_literal}
        parts = Counter(part for word in longest.values() for part in _parts(word))
        for literal, word in longest.items():
            part = min(_parts(word), key=parts.__getitem__, default="")
            self._by_part[part].append((word, literal))
        self._of_words: dict[str, tuple[str, ...]] = {}
        """Of words seen before: literals that a line with it may hold."""

    def classify(self, line: str) -> Family | None:
        """Return the family of a line, its prefixes included, or None."""
        rule = self.match(line)
        return rule.family if rule else None

    def match(self, line: str) -> Rule | None:
        """Return the rule that decides about a line, or None."""
        prefix = parse_prefix(clip(line))
        return self.match_text(prefix.text, prefix.level)

    def match_text(self, text: str, level: LineLevel) -> Rule | None:
        """Return the rule for a line that its prefixes were taken off."""
        text = text.lower()
        possible = set(self._always)
        for word in {*text.split()}:
            known = self._of_words.get(word)
            for literal in self._literals_of(word) if known is None else known:
                if literal in text:
                    possible.update(self._by_literal[literal])
        for at in sorted(possible):
            rule, expression = self._tries[at]
            if rule.family.soft and level is not LineLevel.ERROR:
                continue
            if expression.matches(text):
                return rule
        return None

    def _literals_of(self, word: str) -> tuple[str, ...]:
        """Return the literals whose longest word is in ``word``."""
        parts = self._by_part.keys() & {"", *_parts(word)}
        found = tuple(literal for part in parts for piece, literal in self._by_part[part] if piece in word)
        if len(word) <= _MAX_WORD:
            if len(self._of_words) >= _MAX_WORDS:
                self._of_words.clear()
            self._of_words[word] = found
        return found


def _parts(text: str) -> set[str]:
    return {text[at : at + MIN_LITERAL] for at in range(len(text) - MIN_LITERAL + 1)}


def clip(line: str) -> str:
    """Return what patterns see of a long line."""
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - _TAIL] + " " + line[-_TAIL:]


@functools.lru_cache(maxsize=8)
def load_rules(site: Path | None = None) -> RuleSet:
    """Return the built-in rules, behind those of a site's own file.

    A site's file has the same form. A new id adds a family; a known id with ``match`` adds patterns, and
    with ``policy``, ``says``, ``strength``, ``soft`` or ``transient`` changes that of the family.

    Raises:
        RulesError: a file is wrong.
    """
    documents = [path for path in (BUILT_IN, site) if path is not None]
    families: dict[str, Family] = {}
    rules: list[list[Rule]] = []
    for path in documents:
        entries = list(_entries(path))
        for entry in entries:
            if "is" not in entry:
                families[entry["id"]] = _family(entry, families, path)
        rules.insert(0, [_rule(entry, _named(entry, families, path), path) for entry in entries])
    return RuleSet([_with_family(rule, families) for found in rules for rule in found])


def _with_family(rule: Rule, families: dict[str, Family]) -> Rule:
    return replace(rule, family=families[rule.family.id])


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    try:
        document = read_yaml(path)
    except SiteFileError as error:
        raise RulesError(f"rules file {path}: {error}") from error
    if not isinstance(document, dict) or document.get("version") != RULES_VERSION:
        raise RulesError(f"rules file {path}: `version: {RULES_VERSION}` and a list `families` are expected")
    entries = document.get("families")
    if not isinstance(entries, list):
        raise RulesError(f"rules file {path}: `families` must be a list")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise RulesError(f"rules file {path}: every family needs an `id`")
        unknown = set(entry) - _KEYS
        if unknown:
            raise RulesError(
                f"rules file {path}, {entry['id']}: unknown key {sorted(unknown)[0]}; accepted: "
                + ", ".join(sorted(_KEYS))
            )
        for key, (kind, accepted) in _TYPES.items():
            value = entry.get(key)
            if key in entry and not (
                all(type(one) is str and one for one in value)
                if kind is list and type(value) is list
                else type(value) is kind
            ):
                raise RulesError(f"rules file {path}, {entry['id']}: `{key}` must be {accepted}")
        yield entry


_KEYS = frozenset(["id", "is", "policy", "says", "strength", "soft", "transient", "match"])
_TYPES: dict[str, tuple[type, str]] = {
    "is": (str, "a family's id"),
    "says": (str, "a text"),
    "strength": (int, "a whole number"),
    "soft": (bool, "true or false"),
    "transient": (bool, "true or false"),
    "match": (list, "a list of texts"),
}


def _family(entry: dict[str, Any], known: dict[str, Family], path: Path) -> Family:
    before = known.get(entry["id"])
    policy = entry.get("policy")
    if policy is None and before is None:
        raise RulesError(
            f"rules file {path}, {entry['id']}: `policy: [role, scope, restart, exclude]` is needed"
        )
    changes: dict[str, Any] = {
        key: entry[key] for key in ("says", "strength", "soft", "transient") if key in entry
    }
    if policy is not None:
        changes |= _policy(policy, entry["id"], path)
    if before is not None:
        return replace(before, **changes)
    return Family(id=entry["id"], **{"says": entry["id"], **changes})


def _named(entry: dict[str, Any], families: dict[str, Family], path: Path) -> Family:
    name = entry.get("is", entry["id"])
    if name not in families:
        raise RulesError(f"rules file {path}, {entry['id']}: `is: {name}` names no family")
    return families[name]


def _policy(policy: Any, name: str, path: Path) -> dict[str, Any]:
    kinds: tuple[type[enum.Enum], ...] = (Role, Scope, Restart, Exclude)
    if not isinstance(policy, list) or len(policy) != len(kinds):
        raise RulesError(f"rules file {path}, {name}: `policy` is [role, scope, restart, exclude]")
    found = {}
    for kind, value in zip(kinds, policy, strict=True):
        word = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
        try:
            found[kind.__name__.lower()] = kind(word)
        except ValueError as error:
            accepted = ", ".join(member.value for member in kind)
            raise RulesError(
                f"rules file {path}, {name}: {kind.__name__.lower()} {word!r} is none of {accepted}"
            ) from error
    return found


def _rule(entry: dict[str, Any], family: Family, path: Path) -> Rule:
    patterns = tuple(entry.get("match") or ())
    expressions = []
    for pattern in patterns:
        text = _MACRO.sub(lambda found: _XID % found.group(1), str(pattern))
        try:
            problem = why_not_linear(text)
        except re.error as error:
            raise RulesError(f"rules file {path}, {entry['id']}: {pattern!r}: {error}") from error
        if problem:
            raise RulesError(f"rules file {path}, {entry['id']}: {pattern!r} {problem}")
        expressions.append(Expression(text, needed_literals(text)))
    return Rule(entry["id"], family, patterns, path.name, tuple(expressions))
