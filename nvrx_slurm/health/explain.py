"""What a check reads and how it decides, from what its decorator, docstring and settings say."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_type_hints

import msgspec

from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.registry import Check, Settings
from nvrx_slurm.health.stage import EVERY_STAGE

_WIDTH = 100


@dataclass(frozen=True)
class Key:
    """One key of a check's configuration."""

    name: str
    default: object
    description: str


def keys(check: Check) -> list[Key]:
    """Return a check's keys, those of its own first."""
    hints = get_type_hints(check.settings, include_extras=True)
    common = {field.name for field in msgspec.structs.fields(Settings)}
    found = [
        Key(field.name, getattr(check.defaults, field.name), _description(hints[field.name]))
        for field in msgspec.structs.fields(check.settings)
    ]
    return sorted(found, key=lambda key: key.name in common)


def _description(hint: object) -> str:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.description:
            return meta.description
    return ""


def explanation(check: Check, config: HealthConfig) -> Iterator[str]:
    """Yield lines of text about one check, with the thresholds that hold here."""
    settings = config.of(check)
    yield f"{check.name}: {check.summary}"
    yield ""
    yield from textwrap.wrap(" ".join(check.reads.split()), _WIDTH)
    if check.reads:
        yield ""
    strikes = check.strikes_needed(settings)
    state = "on" if config.is_on(check) else "off"
    yield f"here      {settings.mode if state == 'on' else 'off'}{' (opt-in)' if check.opt_in else ''}"
    yield f"runs at   {', '.join(stage.value for stage in check.stages)}"
    yield f"needs     {', '.join(need.value for need in check.needs)}"
    yield f"time-out  {check.timeout_s(settings):g} s: then a warning"
    yield f"drains    {'at first sight' if strikes == 1 else f'when seen {strikes} times in a row'}"
    yield ""
    yield f"configuration, under checks: {check.name}:"
    for key in keys(check):
        value = msgspec.json.encode(getattr(settings, key.name)).decode()
        default = msgspec.json.encode(key.default).decode()
        changed = "" if value == default else f"  [default: {default}]"
        yield f"  {key.name}: {value}{changed}"
        yield f"      {key.description}"


def overview(checks: Mapping[str, Check], config: HealthConfig) -> Iterator[str]:
    """Yield one line per check."""
    width = max(map(len, checks))
    for name, check in checks.items():
        off = "" if config.is_on(check) else " (off)"
        yield f"{name:{width}}  {check.summary}{off}"


def markdown_table(checks: Iterable[Check]) -> Iterator[str]:
    """Yield the lines of the table in docs/health.md."""
    yield "| check | what it is for | stages | reads | time-out | a fail counts |"
    yield "|---|---|---|---|---|---|"
    for check in checks:
        stages = "all" if check.stages == EVERY_STAGE else ", ".join(stage.value for stage in check.stages)
        needs = ", ".join(need.value for need in check.needs)
        counts = "at first sight" if check.strikes == 1 else f"{check.strikes} times in a row"
        name = f"`{check.name}`{' (opt-in)' if check.opt_in else ''}"
        yield f"| {name} | {check.summary} | {stages} | {needs} | {check.budget_s:g} s | {counts} |"
