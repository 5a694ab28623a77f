"""One job on this machine without Slurm: the real Coordinator, agents and ranks; run as a program.

    python local_job.py RUN_DIR NODES RANKS_PER_NODE SCRIPT KEY=VALUE…

In place of srun a shell starts the agents. KEY=VALUE are keys of the fault-tolerance configuration. Exits as
nvrx-srun does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from nvrx_slurm.coordinator.ft_state import load_ft_state
from nvrx_slurm.coordinator.job import run_job
from nvrx_slurm.coordinator.job_spec import JobSpec
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.preparation import first_cycle
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.fault_tolerance.config import build_config
from nvrx_slurm.slurm import SlurmUnavailableError
from nvrx_slurm.wire import messages as msg

AGENTS = """for node in {nodes}; do
SLURMD_NODENAME=$node {agent} & pids="$pids $!"
done
trap 'kill $pids' TERM
for pid in $pids; do wait $pid; done
"""


class NoSlurm:
    """Cannot be asked anything."""

    def __getattr__(self, name: str) -> Any:
        def ask(*_: object) -> None:
            raise SlurmUnavailableError("there is no Slurm here")

        return ask


def main(run_dir: str, nodes: str, slots: str, script: str, *options: str) -> int:
    given = {key: yaml.safe_load(value) for key, value in (option.split("=", 1) for option in options)}
    config = build_config(("options", given))
    directory = RunDir(Path(run_dir))
    lock = directory.claim()
    names = tuple(f"n{i}" for i in range(int(nodes)))
    agent = Path(sys.prefix) / "bin" / "nvrx-agent"
    spec = JobSpec(
        job_id="1",
        restart_count=0,
        submitted=0,
        host="localhost",
        address="127.0.0.1",
        policy=Policy(
            nodes=names,
            active_nodes=len(names),
            max_restarts=0,
            first_cycle=first_cycle(directory),
        ),
        welcome=msg.Welcome(
            program=msg.Program(kind=msg.ProgramKind.SCRIPT, target=script, args=[], cwd=os.getcwd()),
            job_id="1",
            run_dir=run_dir,
            nproc_per_node=slots,
            warm_start=False,
            max_restarts=0,
            stop_timeout_s=3.0,
        ),
        monitoring=load_ft_state(directory.ft_state, config.monitoring()),
        keep_timeouts=config.calc_ft_timeouts,
        run_dir=directory,
        slurm=NoSlurm(),
        step_argv=["bash", "-c", AGENTS.format(nodes=" ".join(names), agent=agent)],
        step_environ=dict(os.environ),
    )
    code = run_job(spec)
    os.close(lock)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
