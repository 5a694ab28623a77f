"""Flags of torchrun and ft_launcher that do nothing here: accepted with a note, or refused with why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

NO_POLL = "nothing is polled or checked at intervals"
NO_HEALTH = "health checks have a configuration of their own: --health-config, see health.md"
NO_SERVICE = "the attribution service is the site's to start"
STREAMS = "output comes over the agents' own connections; no log server is needed"


@dataclass(frozen=True)
class ForeignFlag:
    """One such flag, spelt with dashes."""

    name: str
    why: str
    accepted: Sequence[str] | None = None
    """Values that change nothing here, and so are accepted; None: any."""
    is_flag: bool = False
    from_environment: bool = False
    """``PET_…`` sets it too."""

    @property
    def parameter(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def row(self) -> str:
        """Of the table in docs/launch.md."""
        if self.accepted is None:
            return f"| `{self.name}` | no effect: {self.why} |"
        only = f" (accepted: {', '.join(f'`{value}`' for value in self.accepted)})" if self.accepted else ""
        return f"| `{self.name}` | refused: {self.why}{only} |"

    def check(self, context: click.Context, _param: click.Parameter, value: object) -> None:
        """Note that the flag has no effect, or refuse it."""
        if context.get_parameter_source(self.parameter) in (None, click.core.ParameterSource.DEFAULT):
            return
        if self.accepted is None or str(value).lower() in self.accepted:
            click.echo(f"nvrx-launch: note: {self.name} has no effect: {self.why}", err=True)
            return
        only = f"; accepted: {', '.join(self.accepted)}" if self.accepted else ""
        raise click.UsageError(f"{self.name} cannot be used: {self.why}{only}")


def _no_effect(name: str, why: str, **keywords: Any) -> ForeignFlag:
    return ForeignFlag(name, why, **keywords)


def _refused(name: str, why: str, *accepted: str, **keywords: Any) -> ForeignFlag:
    return ForeignFlag(name, why, accepted, **keywords)


FOREIGN_FLAGS = (
    _no_effect("--monitor-interval", NO_POLL, from_environment=True),
    _refused(
        "--start-method",
        "ranks are programs, and it is for functions",
        *("spawn", "fork", "forkserver"),
        from_environment=True,
    ),
    _no_effect("--event-log-handler", "events are in journal.jsonl", from_environment=True),
    _refused("--logs-specs", "logs are in the run directory, in one layout"),
    _refused("--numa-binding", "--numa-bind auto binds each rank to the NUMA node of its GPU"),
    _refused("--duplicate-stdout-filters", "search cycles/N/merged.log instead", from_environment=True),
    _refused("--duplicate-stderr-filters", "search cycles/N/merged.log instead", from_environment=True),
    _no_effect("--ft-workload-check-interval", NO_POLL),
    _no_effect("--ft-restart-check-interval", NO_POLL),
    _no_effect("--ft-skip-section-response", "no heartbeat or section waits for an answer"),
    _refused("--ft-restart-policy", "one fails, all restart", "any-failed"),
    _refused("--ft-rdzv-impl", "the nodes meet at the Coordinator", "barrier"),
    _no_effect("--ft-log-level", "what the launcher says does not depend on a level"),
    _no_effect("--ft-ignore-missing-cfg", "a missing file is always refused", is_flag=True),
    _refused(
        "--ft-rank-termination-signal",
        "a hung rank is killed with SIGKILL, after its stacks were kept",
        *("sigkill", "9"),
    ),
    _no_effect(
        "--ft-check-remaining-processes", "all processes of a rank are killed before the next cycle begins"
    ),
    _no_effect("--ft-enable-log-server", STREAMS, from_environment=True),
    _no_effect("--ft-log-server-port", STREAMS, from_environment=True),
    _no_effect("--ft-log-aggregator-count", STREAMS, from_environment=True),
    _no_effect("--ft-log-leaf-max-queue-chunks", STREAMS, from_environment=True),
    _no_effect("--ft-log-server-log-prefix", STREAMS, from_environment=True),
    _no_effect("--ft-log-server-graceful-shutdown-timeout", STREAMS, from_environment=True),
    _no_effect(
        "--ft-nvrx-logfile",
        "the launcher's messages are on standard error, and every event is in journal.jsonl",
        from_environment=True,
    ),
    _no_effect("--ft-gpu-memory-poll-interval", NO_POLL),
    _refused("--ft-node-health-check-interval", NO_HEALTH),
    _refused("--ft-node-health-check-endpoint", NO_HEALTH),
    _refused("--ft-enable-nic-monitor", NO_HEALTH, "false", "0", "no"),
    _refused("--ft-enable-nic-healthcheck", NO_HEALTH, "false", "0", "no"),
    _refused("--ft-pci-topo-file", NO_HEALTH),
    _refused("--ft-link-down-path-template", NO_HEALTH),
    _refused("--ft-link-state-path-template", NO_HEALTH),
    _refused("--ft-enable-dist-storage-healthcheck", NO_HEALTH, "false", "0", "no"),
    _refused("--ft-storage-health-check-path", NO_HEALTH),
    _refused("--ft-attribution-startup-timeout", NO_SERVICE),
    _refused("--ft-attribution-llm-api-key-file", NO_SERVICE),
    _refused("--ft-attribution-llm-base-url", NO_SERVICE),
    _refused("--ft-attribution-llm-model", NO_SERVICE),
    _refused("--ft-attribution-analysis-backend", NO_SERVICE),
    _refused("--ft-attribution-log-level", NO_SERVICE),
    _refused("--ft-attribution-export-url", NO_SERVICE),
)


def foreign_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add those that the command does not offer itself; docs/launch.md has them, the help has not."""
    offered = {name for option in command.__click_params__ for name in option.opts}  # type: ignore[attr-defined]
    for flag in reversed([flag for flag in FOREIGN_FLAGS if flag.name not in offered]):
        command = click.option(
            flag.name,
            is_flag=flag.is_flag,
            envvar=f"PET_{flag.parameter.upper()}" if flag.from_environment else None,
            expose_value=False,
            hidden=True,
            callback=flag.check,
        )(command)
    return command
