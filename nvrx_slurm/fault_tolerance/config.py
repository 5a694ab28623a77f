"""The fault-tolerance configuration: its keys, what each accepts, and the YAML file that may hold them.

Precedence: command line, then file, then default. Everything is checked before the job starts; an error is
one sentence that names the source, the key and what is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nvrx_slurm.durations import NO_LIMIT, parse_duration
from nvrx_slurm.wire.node_options import MOST_COUNT, NodeOptions
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts, check_section_names

DEFAULT_OUT_OF_SECTION_S = 3600.0
"""While sections are monitored and nothing else was said: a default that is on."""
_TOP_KEY = "fault_tolerance"


class ConfigError(ValueError):
    """The configuration can't be used; the message names source, key and what is accepted."""


_STOP_MARGIN_S = 15.0


@dataclass(frozen=True)
class FaultToleranceConfig:
    """Values in seconds; None: no limit. Names are those of NVIDIA's extension where it has them."""

    initial_rank_heartbeat_timeout: float | None = 3600.0
    rank_heartbeat_timeout: float | None = 2700.0
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    rank_section_warmup_timeouts: Mapping[str, float] = field(default_factory=dict)
    """Instead of the section's time-out for its first ``num_warmup_iterations`` openings of a cycle."""
    num_warmup_iterations: int = 5
    safety_factor: float = 5.0
    calc_ft_timeouts: bool = True
    """Begin with the calculated time-outs of ``ft_state.json`` in the run directory, and keep them there."""
    gpu_memory_reclaim_timeout: float = NodeOptions().gpu_memory_reclaim_timeout_s
    """0: a restart does not wait for the memory of GPUs."""
    gpu_memory_tolerance_mb: float = NodeOptions().gpu_memory_tolerance_mb
    checkpoint_write_timeout: float = NodeOptions().checkpoint_write_timeout_s
    """0: a restart does not wait for checkpoints that are being written."""
    numa_bind: bool = NodeOptions().numa_bind
    numa_bind_strict: bool = NodeOptions().numa_bind_strict
    install_exception_hook: bool = NodeOptions().install_exception_hook
    preload: Sequence[str] = ()
    max_no_progress_cycles: int = 3
    """Cycles in a row that bring no higher step, after which the job ends; 0: no bound."""
    min_progress_iterations: int = 1
    checkpoint_iteration_file: Path | None = None
    """Holds one integer, the iteration of the newest checkpoint; written by the training."""
    cycle_info_dir: Path | None = None
    """Where one JSON file per cycle tells watchers of it."""
    per_cycle_applog_prefix: Path | None = None
    """All output of a cycle goes to a file of this name with ``_cycle<N>``, too."""
    health_checks: bool = NodeOptions().health
    """Nodes look at themselves; one that is broken leaves the job."""
    health_config: Path | None = None
    """On every node; None: ``/etc/nvrx/health.yaml``, where it is there."""
    attribution: bool = True
    """What ended a cycle is found out in the background, from its logs and traces."""
    attribution_stop_action: str = "log"
    """When that finds that another try is of no use: ``log`` says so, ``no-restart`` ends the job."""
    attribution_endpoint: str = ""
    """URL of a service that is asked about each cycle, too; empty: none is."""

    def monitoring(self) -> Monitoring:
        """Return what ranks and monitors are told."""
        return Monitoring(
            heartbeat=HeartbeatTimeouts(
                initial=self.initial_rank_heartbeat_timeout, subsequent=self.rank_heartbeat_timeout
            ),
            section=SectionTimeouts(
                section=dict(self.rank_section_timeouts), out_of_section=self.rank_out_of_section_timeout
            ),
            warmup=dict(self.rank_section_warmup_timeouts),
            warmup_iterations=self.num_warmup_iterations,
            safety_factor=self.safety_factor,
        )

    def node_options(self) -> NodeOptions:
        """Return what agents are told."""
        return NodeOptions(
            preload=list(self.preload),
            install_exception_hook=self.install_exception_hook,
            gpu_memory_reclaim_timeout_s=self.gpu_memory_reclaim_timeout,
            gpu_memory_tolerance_mb=self.gpu_memory_tolerance_mb,
            checkpoint_write_timeout_s=self.checkpoint_write_timeout,
            numa_bind=self.numa_bind,
            numa_bind_strict=self.numa_bind_strict,
            health=self.health_checks,
            health_config="" if self.health_config is None else str(self.health_config),
        )

    def stop_timeout_s(self, workers_stop_s: float) -> float:
        """Return when a node that was told to stop is given up: after all that it may wait for."""
        return (
            workers_stop_s + self.gpu_memory_reclaim_timeout + self.checkpoint_write_timeout + _STOP_MARGIN_S
        )

    @classmethod
    def from_monitoring(cls, monitoring: Monitoring) -> FaultToleranceConfig:
        """Return the part that a rank is told."""
        return cls(
            initial_rank_heartbeat_timeout=monitoring.heartbeat.initial,
            rank_heartbeat_timeout=monitoring.heartbeat.subsequent,
            rank_section_timeouts=dict(monitoring.section.section),
            rank_out_of_section_timeout=monitoring.section.out_of_section,
            rank_section_warmup_timeouts=dict(monitoring.warmup),
            num_warmup_iterations=monitoring.warmup_iterations,
            safety_factor=monitoring.safety_factor,
        )


# --- one parser per kind of value; each raises ValueError with what is accepted ------------------------


def _limit(value: object) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() in NO_LIMIT):
        return None
    return _duration(value, "a duration above 0 (30, 90s, 5m, 1.5h) or none")


def _duration(value: object, accepted: str = "a duration above 0 (30, 90s, 5m, 1.5h)") -> float:
    try:
        if isinstance(value, str):
            return parse_duration(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_positive(value):
            return float(value)
    except ValueError:
        pass
    raise ValueError(accepted)


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _by_section(value: object, parse: Callable[[object], float | None]) -> dict[str, float | None]:
    accepted = "section names, each with a duration above 0 or none: step:30s,checkpoint:5m"
    if isinstance(value, str):
        value = _split(value, accepted)
    if value is None:
        value = {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(accepted)
    check_section_names(list(value))
    try:
        return {name: parse(timeout) for name, timeout in value.items()}
    except ValueError as error:
        raise ValueError(f"{accepted} ({error})") from error


def _split(text: str, accepted: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, timeout = (word.strip() for word in part.rpartition(":"))
        if not colon or name in pairs:
            raise ValueError(accepted if not colon else f"each section once, not {name!r} twice")
        pairs[name] = timeout
    return pairs


def _section_limits(value: object) -> dict[str, float | None]:
    return _by_section(value, _limit)


def _warmup_durations(value: object) -> dict[str, float]:
    parsed = _by_section(value, _duration)
    return {name: timeout for name, timeout in parsed.items() if timeout is not None}


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT:
        return value
    raise ValueError("a whole number of 0 or more")


def _least(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_COUNT:
        return value
    raise ValueError("a whole number of 1 or more")


def _path(value: object) -> Path | None:
    if value is None:
        return None
    if isinstance(value, str | Path) and str(value).strip():
        return Path(value).absolute()
    raise ValueError("the path of a file")


def _factor(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 1:
        return float(value)
    raise ValueError("a number of 1 or more")


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("true or false")


def _auto_or_off(value: object) -> bool:
    # YAML 1.1 reads a bare "off" as false.
    if value in ("auto", "off", False):
        return value == "auto"
    raise ValueError("auto or off")


def _duration_or_0(value: object) -> float:
    if value is None or (not isinstance(value, bool) and value in (0, "0", "0s", *NO_LIMIT)):
        return 0.0
    return _duration(value, "a duration (30, 90s, 5m), or 0 for off")


def _megabytes(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise ValueError("a number of MiB, 0 or more")


def _endpoint(value: object) -> str:
    if value in (None, ""):
        return ""
    accepted = "the URL of a service that runs already: http://HOST:PORT or https://HOST:PORT"
    parts = urlsplit(value) if isinstance(value, str) and value.isprintable() else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(accepted)
    if " " in str(value) or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(accepted)
    try:
        parts.port  # noqa: B018  # it is only checked when it is asked for
    except ValueError:
        raise ValueError(accepted) from None
    return str(value)


def _stop_action(value: object) -> str:
    if value is None:
        return "log"
    if value in ("log", "no-restart"):
        return str(value)
    raise ValueError("log or no-restart")


def _modules(value: object) -> list[str]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if names == [""] or names is None:
        return []
    if isinstance(names, list) and all(isinstance(name, str) and _is_module(name) for name in names):
        return names
    raise ValueError("names of modules, as in transformers,apex.optimizers")


def _is_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


_PARSERS: Mapping[str, Callable[[object], Any]] = {
    "initial_rank_heartbeat_timeout": _limit,
    "rank_heartbeat_timeout": _limit,
    "rank_section_timeouts": _section_limits,
    "rank_out_of_section_timeout": _limit,
    "rank_section_warmup_timeouts": _warmup_durations,
    "num_warmup_iterations": _count,
    "safety_factor": _factor,
    "calc_ft_timeouts": _switch,
    "gpu_memory_reclaim_timeout": _duration_or_0,
    "gpu_memory_tolerance_mb": _megabytes,
    "checkpoint_write_timeout": _duration_or_0,
    "numa_bind": _auto_or_off,
    "numa_bind_strict": _switch,
    "install_exception_hook": _switch,
    "preload": _modules,
    "max_no_progress_cycles": _count,
    "min_progress_iterations": _least,
    "checkpoint_iteration_file": _path,
    "cycle_info_dir": _path,
    "per_cycle_applog_prefix": _path,
    "health_checks": _switch,
    "health_config": _path,
    "attribution": _switch,
    "attribution_stop_action": _stop_action,
    "attribution_endpoint": _endpoint,
}
assert set(_PARSERS) == {key.name for key in fields(FaultToleranceConfig)}

NOT_NEEDED: Mapping[str, str] = {
    "workload_check_interval": "deadlines are timers, nothing is checked at intervals",
    "restart_check_interval": "restarts are not polled for",
    "skip_section_response": "no heartbeat or section waits for an answer",
    "gpu_memory_poll_interval": "GPU memory is checked every 100 ms, and only while a restart waits for it",
    "log_level": "what is said does not depend on a level",
    "check_remaining_processes": "all processes of a rank are killed before the next cycle begins",
}
"""Keys of NVIDIA's extension that say how, not what; accepted, and without effect."""

_HEALTH = "health checks have a configuration of their own: --health-config, see health.md"
_SERVICE = "the attribution service is the site's to start"
NOT_OFFERED: Mapping[str, tuple[str, Sequence[object]]] = {
    "rank_termination_signal": ("a hung rank is killed with SIGKILL", ("SIGKILL", 9)),
    "segment": ("it is an option, --ft-segment", ()),
    "node_health_check_interval": (_HEALTH, ()),
    "enable_nic_monitor": (_HEALTH, (False,)),
    "enable_nic_healthcheck": (_HEALTH, (False,)),
    "enable_dist_storage_healthcheck": (_HEALTH, (False,)),
    "storage_healthcheck_path": (_HEALTH, ()),
    "pci_topo_file": (_HEALTH, ()),
    "link_down_path_template": (_HEALTH, ()),
    "link_state_path_template": (_HEALTH, ()),
    "attribution_export_url": (_SERVICE, ()),
}
"""Keys of NVIDIA's extension that cannot be obeyed: why, and what may be said because it changes nothing, as
null may."""


def build_config(*sources: tuple[str, Mapping[str, object]]) -> FaultToleranceConfig:
    """Return the configuration from several sources, the first wins.

    Args:
        sources: how each is called in an error message, and its keys and values.

    Raises:
        ConfigError: an unknown key or a value that is not accepted.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, given in reversed(sources):
        for key, value in given.items():
            if key in NOT_NEEDED:
                continue
            parse = _PARSERS.get(key)
            if parse is None and key in NOT_OFFERED:
                why, harmless = NOT_OFFERED[key]
                if value is not None and value not in harmless:
                    raise ConfigError(f"{name}: {key}: {value!r}: cannot be obeyed: {why}")
                continue
            if parse is None:
                raise ConfigError(f"{name}: unknown key {key!r}; accepted: {', '.join(_PARSERS)}")
            try:
                values[key] = parse(value)
            except ValueError as error:
                raise ConfigError(f"{name}: {key}: {value!r}: accepted: {error}") from error
            origin[key] = name
    if values.get("rank_section_timeouts"):
        values.setdefault("rank_out_of_section_timeout", DEFAULT_OUT_OF_SECTION_S)
    config = FaultToleranceConfig(**values)
    for section in config.rank_section_warmup_timeouts:
        if section not in config.rank_section_timeouts:
            raise ConfigError(
                f"{origin['rank_section_warmup_timeouts']}: rank_section_warmup_timeouts: {section!r} has no "
                f"entry in rank_section_timeouts (there: {', '.join(config.rank_section_timeouts) or 'none'})"
            )
    return config


def read_config_file(path: Path) -> Mapping[str, object]:
    """Return the keys of the one ``fault_tolerance`` mapping in a YAML file, at whatever depth it is.

    Raises:
        ConfigError: no such file, no YAML, or not exactly one such mapping.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    found = list(_find(document))
    if len(found) != 1:
        raise ConfigError(
            f"{path}: one mapping {_TOP_KEY!r} is needed, at any depth; there are {len(found)}"
            if found
            else f"{path}: there is no mapping {_TOP_KEY!r}; one is needed, at any depth"
        )
    mapping = {} if found[0] is None else found[0]
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path}: {_TOP_KEY!r} must be a mapping of keys to values, not {mapping!r}")
    return {str(key): value for key, value in mapping.items()}


def _find(node: object) -> list[object]:
    found: list[object] = []
    if isinstance(node, Mapping):
        for key, value in node.items():
            found += [value] if key == _TOP_KEY else _find(value)
    elif isinstance(node, list):
        for value in node:
            found += _find(value)
    return found
