"""The options of fault tolerance, which every command that starts ranks has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from nvrx_slurm.cli.parameters import Count, Duration

_F = TypeVar("_F", bound=Callable[..., Any])

_KEYS = {
    "heartbeat_timeout": "rank_heartbeat_timeout",
    "initial_heartbeat_timeout": "initial_rank_heartbeat_timeout",
    "section_timeouts": "rank_section_timeouts",
    "out_of_section_timeout": "rank_out_of_section_timeout",
    "section_warmup_timeouts": "rank_section_warmup_timeouts",
    "warmup_iterations": "num_warmup_iterations",
    "safety_factor": "safety_factor",
    "calc_timeouts": "calc_ft_timeouts",
    "gpu_memory_reclaim_timeout": "gpu_memory_reclaim_timeout",
    "gpu_memory_tolerance_mb": "gpu_memory_tolerance_mb",
    "checkpoint_write_timeout": "checkpoint_write_timeout",
    "numa_bind": "numa_bind",
    "numa_bind_strict": "numa_bind_strict",
    "install_exception_hook": "install_exception_hook",
    "preload": "preload",
    "max_no_progress_cycles": "max_no_progress_cycles",
    "min_progress_iterations": "min_progress_iterations",
    "checkpoint_iteration_file": "checkpoint_iteration_file",
    "cycle_info_dir": "cycle_info_dir",
    "per_cycle_applog_prefix": "per_cycle_applog_prefix",
    "health": "health_checks",
    "health_config": "health_config",
    "ft_attribution": "attribution",
    "ft_attribution_stop_action": "attribution_stop_action",
    "ft_attribution_endpoint": "attribution_endpoint",
}
"""Parameter to key of the configuration."""

_SWITCHES = {
    "calc_ft_timeouts",
    "numa_bind_strict",
    "install_exception_hook",
    "health_checks",
    "attribution",
}
_ON_OFF = click.Choice(["on", "off", "true", "false"], case_sensitive=False)

_OPTIONS = [
    click.option(
        "--heartbeat-timeout",
        "--ft-rank-heartbeat-timeout",
        type=Duration(or_none=True),
        help="A rank that calls send_heartbeat and then is silent for this long is hung; none: never."
        "  [default: 45m]",
    ),
    click.option(
        "--initial-heartbeat-timeout",
        "--ft-initial-rank-heartbeat-timeout",
        type=Duration(or_none=True),
        help="The same from init_workload_monitoring to the first heartbeat or section.  [default: 60m]",
    ),
    click.option(
        "--section-timeouts",
        "--ft-rank-section-timeouts",
        metavar="NAME:TIME,…",
        help="How long each section may stay open, as in step:30s,checkpoint:5m; none: measured, not limited."
        "  [default: no section is monitored]",
    ),
    click.option(
        "--out-of-section-timeout",
        "--ft-rank-out-of-section-timeout",
        type=Duration(or_none=True),
        help="How long no section may be open; none: for ever.  [default: 60m with --section-timeouts]",
    ),
    click.option(
        "--section-warmup-timeouts",
        metavar="NAME:TIME,…",
        help="Instead of a section's time-out when it is opened for the first times in a cycle.",
    ),
    click.option(
        "--warmup-iterations",
        type=Count(0),
        help="How many times --section-warmup-timeouts are for.  [default: 5]",
    ),
    click.option(
        "--safety-factor",
        "--ft-safety-factor",
        type=float,
        help="Calculated time-outs are this times the longest that was measured.  [default: 5]",
    ),
    click.option(
        "--calc-timeouts",
        "--ft-calc-timeouts",
        type=_ON_OFF,
        metavar="on|off",
        help="Begin with the calculated time-outs of an earlier job with this run directory, and keep those "
        "of this one.  [default: on]",
    ),
    click.option(
        "--preload",
        metavar="MODULES",
        help="Modules, separated by commas, that the worker server imports after torch; one that leaves "
        "threads or initialises CUDA makes ranks start in new interpreters.",
    ),
    click.option(
        "--install-exception-hook",
        "--ft-install-exception-hook",
        type=_ON_OFF,
        metavar="on|off",
        help="End a rank at once after the traceback of an exception that nobody caught, without joining "
        "threads or running exit handlers.  [default: off: all restart if it lives on]",
    ),
    click.option(
        "--gpu-memory-reclaim-timeout",
        "--ft-gpu-memory-reclaim-timeout",
        metavar="DURATION|0",
        help="How long at most a restart waits until the memory of this job's GPUs is free; 0: it does not."
        "  [default: 50s]",
    ),
    click.option(
        "--gpu-memory-tolerance-mb",
        "--ft-gpu-memory-tolerance-mb",
        type=float,
        help="A GPU of which no more MiB are used is free.  [default: 512]",
    ),
    click.option(
        "--checkpoint-write-timeout",
        metavar="DURATION|0",
        help="How long at most a restart waits for checkpoints whose copy in memory is complete and that are "
        "being written; 0: it does not.  [default: 10s]",
    ),
    click.option(
        "--numa-bind",
        type=click.Choice(["auto", "off"]),
        help="auto: bind each rank to the NUMA node of its GPU; without GPUs spread ranks over the nodes."
        "  [default: off]",
    ),
    click.option(
        "--numa-bind-strict",
        "--ft-numa-bind-strict",
        type=_ON_OFF,
        metavar="on|off",
        help="With --numa-bind: memory comes from that NUMA node only; off: from there first.  [default: on]",
    ),
    click.option(
        "--max-no-progress-cycles",
        "--ft-max-no-progress-cycles",
        type=Count(0),
        help="Cycles in a row without a higher step, after which the job ends; 0: no bound.  [default: 3]",
    ),
    click.option(
        "--min-progress-iterations",
        "--ft-min-progress-iterations",
        type=Count(1),
        help="How much the highest step must grow in a cycle to be progress.  [default: 1]",
    ),
    click.option(
        "--checkpoint-iteration-file",
        "--ft-checkpoint-iteration-file",
        type=click.Path(path_type=Path),
        help="File with one integer, the newest checkpoint's step, where ranks do not report checkpoints.",
    ),
    click.option(
        "--cycle-info-dir",
        "--ft-cycle-info-dir",
        type=click.Path(path_type=Path),
        help="Write a JSON file there when a cycle begins and when it ends: nodes, log, end, cause.",
    ),
    click.option(
        "--per-cycle-applog-prefix",
        "--ft-per-cycle-applog-prefix",
        envvar="PET_FT_PER_CYCLE_APPLOG_PREFIX",
        type=click.Path(path_type=Path),
        help="Write all output to PREFIX_cycle<N>.log too, each line with its rank.",
    ),
    click.option(
        "--health",
        type=_ON_OFF,
        metavar="on|off",
        help="Nodes check themselves before the first cycle, between cycles and now and then; one that fails "
        "leaves the job.  [default: on]",
    ),
    click.option(
        "--health-config",
        type=click.Path(path_type=Path),
        help="What they check, and with which thresholds.  [default: /etc/nvrx/health.yaml, if it is there]",
    ),
    click.option(
        "--ft-attribution",
        type=_ON_OFF,
        metavar="on|off",
        help="Find out in the background, from logs and traces, what ended a cycle, and tell it."
        "  [default: on]",
    ),
    click.option(
        "--ft-attribution-stop-action",
        type=click.Choice(["log", "no-restart"]),
        help="When that finds that another try would end the same: log tells it, no-restart ends the job at "
        "the first moment when that costs no training.  [default: log]",
    ),
    click.option(
        "--ft-attribution-endpoint",
        metavar="URL",
        help="Ask this service about each cycle, too: http://HOST:PORT, which has NVIDIA's /logs.",
    ),
    click.option(
        "--ft-config",
        "--ft-cfg-path",
        "ft_config",
        type=click.Path(path_type=Path),
        help="YAML file with a mapping fault_tolerance; options win over it.",
    ),
]


def fault_tolerance_options(command: _F) -> _F:
    """Add the options; ``command`` gets them as ``fault_tolerance``, a checked configuration."""

    @functools.wraps(command)
    def with_config(*args: Any, ft_config: Path | None, **kwargs: Any) -> Any:
        from nvrx_slurm.fault_tolerance.config import ConfigError, build_config, read_config_file

        given = {key: kwargs.pop(parameter) for parameter, key in _KEYS.items()}
        context = click.get_current_context()
        chosen: dict[str, object] = {
            key: given[key]
            for parameter, key in _KEYS.items()
            if context.get_parameter_source(parameter) is not click.core.ParameterSource.DEFAULT
        }
        for key in _SWITCHES & chosen.keys():
            chosen[key] = chosen[key] in ("on", "true")
        try:
            file = [] if ft_config is None else [(str(ft_config), read_config_file(ft_config))]
            config = build_config(("command line", chosen), *file)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        if config.health_checks and config.health_config is not None:
            _check_health_config(config.health_config)
        return command(*args, fault_tolerance=config, **kwargs)

    decorated: Any = with_config
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _check_health_config(path: Path) -> None:
    """Refuse here what every node would stumble over."""
    from nvrx_slurm.health.config import ConfigError, load_config
    from nvrx_slurm.health.registry import all_checks

    try:
        load_config(path, all_checks())
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
