"""The site's configuration, ``/etc/nvrx/health.yaml``: which checks run, how, and with which thresholds.

::

    budget_s: 10
    job_interval_s: 60
    state_dir: /var/lib/nvrx/health
    hooks: {brake_share: 0.1}
    checks:
      gpu-throttle: off
      gpu-ecc: {mode: warn-only, timeout_s: 1}
      mounts: {expected: {/scratch: lustre}}

Every key is checked; one that is not known is refused.
"""

from __future__ import annotations

import difflib
import os
import reprlib
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from nvrx_slurm.health.registry import Check, Settings
from nvrx_slurm.health.trust import why_untrusted, why_untrusted_directory

DEFAULT_PATH = Path("/etc/nvrx/health.yaml")
DEFAULT_STATE_DIR = Path("/var/lib/nvrx/health")
DEFAULT_BUDGET_S = 10.0
DEFAULT_JOB_INTERVAL_S = 60.0
_MOST_BYTES = 1 << 20
_KEYS = ("budget_s", "job_interval_s", "state_dir", "hooks", "checks")


class ConfigError(ValueError):
    """The configuration can't be used; the message names file, key and what is accepted."""


class HooksSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What Slurm's Prolog, Epilog and HealthCheckProgram do about what the checks find."""

    brake_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """So much of a partition may be drained for failures of one check, one node at least."""
    deep_checks: tuple[str, ...] = ("gpu-probe",)
    """Run besides the others in the epilog of a job that accuses the node."""
    clean_up: bool = True
    """The epilog ends processes that the job's user has left, and removes files in /dev/shm."""
    clean_up_from_uid: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """Users below are the system's own, and may have services on the node."""
    slurm_bin: Annotated[str, msgspec.Meta(pattern=r"^(/.*)?$")] = ""
    """Where scontrol is, unless in the system's directories."""
    slurm_conf: Annotated[str, msgspec.Meta(pattern=r"^(/.*)?$")] = ""
    """What HealthCheckProgram uses, which slurmd does not tell; empty: Slurm's own default."""


@dataclass(frozen=True)
class HealthConfig:
    """What the site decided; checks without an entry have their defaults."""

    budget_s: float = DEFAULT_BUDGET_S
    job_interval_s: float = DEFAULT_JOB_INTERVAL_S
    """How often the nodes of a job look at themselves beside its training."""
    state_dir: Path = DEFAULT_STATE_DIR
    checks: Mapping[str, Settings] = field(default_factory=dict)
    hooks: HooksSettings = field(default_factory=HooksSettings)

    def of(self, check: Check) -> Settings:
        return self.checks.get(check.name, check.defaults)

    def is_on(self, check: Check) -> bool:
        """An opt-in check is on only where the configuration says so."""
        return self.of(check).mode != "off" and (not check.opt_in or check.name in self.checks)


def load_config(path: Path | None, checks: Mapping[str, Check]) -> HealthConfig:
    """Read ``path``; None: :data:`DEFAULT_PATH`, if it is there.

    Raises:
        ConfigError: it can't be read, is not to be trusted, or says what is not accepted.
    """
    chosen = path or DEFAULT_PATH
    try:
        if path is None and not chosen.exists():
            return HealthConfig()
        text = _read(chosen)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{chosen}: cannot be read: {reason}") from error
    return parse_config(text, str(chosen), checks)


def _read(path: Path) -> str:
    """Raises:
    ConfigError: it is no file, or root must not obey it.
    OSError, UnicodeDecodeError: it can't be read.
    """
    # A FIFO would be waited for.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: cannot be read: it is no file")
        if os.geteuid() == 0:
            if why := why_untrusted(status):
                raise ConfigError(f"{path}: {why}, and root obeys it: chown root, chmod go-w")
            for directory in (path.parent, path.resolve().parent):
                if why := why_untrusted_directory(directory):
                    raise ConfigError(f"{path}: not used: of its directory {directory}, {why}")
        if status.st_size > _MOST_BYTES:
            raise ConfigError(f"{path}: cannot be read: accepted: {_MOST_BYTES >> 20} MiB at most")
        return file.read().decode()


def parse_config(text: str, name: str, checks: Mapping[str, Check]) -> HealthConfig:
    """Return the configuration in ``text``; ``name`` is how an error calls it.

    Raises:
        ConfigError: see :func:`load_config`.
    """
    import yaml

    try:
        document = yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())[:300]}") from error
    top = _mapping({} if document is None else document, name, _KEYS)
    given = _mapping(top.get("checks") or {}, f"{name}: checks", checks)
    return HealthConfig(
        budget_s=_number(top.get("budget_s", DEFAULT_BUDGET_S), f"{name}: budget_s"),
        job_interval_s=_number(top.get("job_interval_s", DEFAULT_JOB_INTERVAL_S), f"{name}: job_interval_s"),
        state_dir=_directory(top.get("state_dir", str(DEFAULT_STATE_DIR)), f"{name}: state_dir"),
        checks={
            check: _settings(value, checks[check], f"{name}: checks: {check}")
            for check, value in given.items()
        },
        hooks=_hooks(top.get("hooks"), f"{name}: hooks", checks),
    )


@cache
def _loader() -> Any:
    """Return a loader that refuses a key that is there twice: else what the first one says would be lost."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                name = (key.tag, str(key.value))
                if name in seen:
                    raise yaml.YAMLError(f"{name[1]:.60} is there twice, line {key.start_mark.line + 1}")
                seen.add(name)
            return super().construct_mapping(node, deep)

    return Loader


def _hooks(value: object, where: str, checks: Mapping[str, Check]) -> HooksSettings:
    accepted = [key.name for key in msgspec.structs.fields(HooksSettings)]
    mapping = _mapping({} if value is None else value, where, accepted)
    try:
        settings = msgspec.convert(mapping, HooksSettings)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ConfigError(f"{where}: {_readable(str(error))}") from error
    for check in settings.deep_checks:
        if check not in checks:
            raise ConfigError(f"{where}: deep_checks: unknown check {check!r:.60}")
    return settings


def _settings(value: object, check: Check, where: str) -> Settings:
    if isinstance(value, bool | str):
        value = {"mode": value}
    keys = [key.name for key in msgspec.structs.fields(check.settings)]
    mapping = dict(_mapping({} if value is None else value, where, keys))
    if isinstance(mapping.get("mode"), bool):
        # YAML reads the bare words on and off as truth values.
        mapping["mode"] = "on" if mapping["mode"] else "off"
    try:
        return msgspec.convert(mapping, check.settings)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ConfigError(f"{where}: {_readable(str(error))}") from error


def _readable(error: str) -> str:
    """Turn msgspec's ``Expected `int` >= 1 - at `$.strikes``` around."""
    what, _, path = error.partition(" - at `$")
    key = path.rstrip("`").lstrip(".")
    what = what[:1].lower() + what[1:]
    return f"{key}: {what}" if key else what


def _mapping(value: object, where: str, accepted: Iterable[str]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: a mapping is needed, not {reprlib.repr(value)}")
    known = list(accepted)
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{where}: unknown key {reprlib.repr(key)}; {hint}accepted: {', '.join(known)}")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 3600:
        return float(value)
    raise ConfigError(f"{where}: {reprlib.repr(value)}: accepted: seconds above 0, 3600 at most")


def _directory(value: object, where: str) -> Path:
    if isinstance(value, str) and value.startswith("/") and "\0" not in value:
        return Path(value)
    raise ConfigError(f"{where}: {reprlib.repr(value)}: accepted: an absolute path")
