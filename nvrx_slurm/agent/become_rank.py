"""Turn a process that the worker server has forked into a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from nvrx_slurm import linux
from nvrx_slurm.agent import server_protocol as protocol
from nvrx_slurm.agent.user_program import command_line, run_user_program


def become_rank(
    order: protocol.StartOrder, spec: protocol.RankSpec, output: int, *, cold: bool
) -> Callable[[], None]:
    """Make the forked process look like a fresh interpreter that was started for ``spec``.

    Returns what runs the user's program, or with ``cold`` does not return: a new interpreter takes over.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(order.env)
    os.environ.update(spec.env)
    linux.set_process_name(f"nvrx-rank{spec.rank}")
    if spec.binding is not None:
        _bind(spec.binding, speaks=spec is order.ranks[0])
    try:
        os.chdir(order.program.cwd)
    except OSError as error:
        print(f"nvrx: cannot enter the working directory: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if cold:
        argv = command_line(order.program)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"nvrx: cannot execute {argv[0]}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return lambda: run_user_program(order.program, exit_on_exception=order.exit_on_exception)


def _bind(binding: protocol.NumaBinding, *, speaks: bool) -> None:
    """Bind CPUs and memory; what can't be bound is left as it is, which one rank of the node says."""
    try:
        os.sched_setaffinity(0, binding.cpus)
        linux.bind_memory(binding.node, strict=binding.strict)
    except OSError as error:
        if speaks:
            print(f"nvrx: not all bound to NUMA node {binding.node}: {error}", file=sys.stderr, flush=True)
