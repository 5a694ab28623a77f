"""Take secrets out of text that leaves the site, and names that a stranger need not know."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

REDACTED = "[redacted]"
_SECRETS = (
    re.compile(
        r"(?i)(\b[\w-]{0,40}(?:api[_-]?key|token|secret|passwd|password|credential|authorization|auth_key)[\w-]{0,20}"
        r"['\"]?\s{0,4}[=:]\s{0,4}['\"]?(?:bearer |basic )?)([^\s'\",;&]{4,400})"
    ),
    re.compile(r"(?i)(\bbearer\s{1,4})([\w.~+/=-]{8,4000})"),
    re.compile(r"(?i)(--?[\w-]{0,40}(?:key|token|secret|password)\s{1,4})([^\s-]\S{3,400})"),
    re.compile(
        r"()\b((?:AKIA|ASIA)[A-Z0-9]{16}|hf_\w{16,80}|gh[pousr]_\w{16,255}|github_pat_\w{20,255}|glpat-[\w-]{16,64})"
    ),
    re.compile(r"()\b((?:sk|pk|rk|nvapi|xox[abprs])-[\w-]{16,255})"),
    re.compile(r"()\b(eyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]{4,1000})"),
    re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://[^\s:/@]{1,200}:)([^\s@/]{1,400})(?=@)"),
    re.compile(r"(?i)(\bwandb\b.{0,40}?)(\b[0-9a-f]{40}\b)"),
)
_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----")
_KEY_END = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY-----")
_EMAIL = re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}\b")
_NAMES = (
    ("EMAIL", _EMAIL),
    ("IP", re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")),
    ("PATH", re.compile(r"(?<![\w.])/(?:[\w.@=+-]{1,120}/){1,24}[\w.@=+-]{0,120}")),
)


def secrets(text: str) -> str:
    """Return the text without passwords, tokens and keys; of a private key nothing is left."""
    lines, inside = [], False
    for line in text.split("\n"):
        if _KEY_BEGIN.search(line):
            inside = _KEY_END.search(line) is None
            lines.append(REDACTED)
        elif inside:
            inside = _KEY_END.search(line) is None
        else:
            lines.append(_line(line))
    return "\n".join(lines)


def _line(line: str) -> str:
    for pattern in _SECRETS:
        line = pattern.sub(lambda found: f"{found.group(1)}{REDACTED}", line)
    return _EMAIL.sub(REDACTED, line)


@dataclass
class Aliases:
    """Replaces names by aliases such as ``<IP1>``, and puts them back."""

    _known: dict[str, str] = field(default_factory=dict)

    def hide(self, text: str) -> str:
        for kind, pattern in _NAMES:
            text = pattern.sub(lambda found, kind=kind: self._alias(kind, found.group(0)), text)  # type: ignore[misc]
        return text

    def restore(self, text: str) -> str:
        for name, alias in self._known.items():
            text = text.replace(alias, name)
        return text

    def _alias(self, kind: str, name: str) -> str:
        return self._known.setdefault(name, f"<{kind}{len(self._known) + 1}>")
