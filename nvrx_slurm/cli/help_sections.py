"""``--help`` of the commands with many options, in sections."""

from __future__ import annotations

import click

OTHER = "Other options"
_SECTIONS = {
    "Nodes and ranks": (
        "nnodes nproc_per_node spares rejoin_timeout segment group_size role node_rank local_addr "
        "virtual_local_rank numa_bind numa_bind_strict warm_start preload"
    ),
    "Rendezvous": (
        "rdzv_endpoint rdzv_id rdzv_backend rdzv_conf standalone master_addr master_port token_file"
    ),
    "Hangs": (
        "heartbeat_timeout initial_heartbeat_timeout section_timeouts out_of_section_timeout "
        "section_warmup_timeouts warmup_iterations safety_factor calc_timeouts"
    ),
    "Restarts": (
        "max_restarts max_restarts_per_hour max_no_progress_cycles min_progress_iterations "
        "checkpoint_iteration_file exclude_after no_restart_exit_code standby_coordinator"
    ),
    "Stopping": (
        "workers_stop_timeout term_timeout shutdown_timeout signals_to_handle time_limit_margin "
        "install_exception_hook gpu_memory_reclaim_timeout gpu_memory_tolerance_mb checkpoint_write_timeout"
    ),
    "Health": "health health_config",
    "Slow ranks": "straggler_action",
    "Attribution": "ft_attribution ft_attribution_stop_action ft_attribution_endpoint",
    "Output": "run_dir log_dir redirects tee local_ranks_filter per_cycle_applog_prefix cycle_info_dir",
    "The program and its start": "module no_python run_path srun_args ft_config dry_run",
}


class SectionedCommand(click.Command):
    """Lists its options by what they are about; one that is in no section comes last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        place = {name: title for title, names in _SECTIONS.items() for name in names.split()}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_SECTIONS, OTHER)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                rows[place.get(parameter.name or "", OTHER)].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
