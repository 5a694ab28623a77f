#!/usr/bin/env python3
"""A real Coordinator over simulated agents; run by ``scale.py`` only.

``coordinator.py RUN_DIR NODES SPARES SLOTS``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nvrx_slurm.coordinator.job import run_job
from nvrx_slurm.coordinator.job_spec import JobSpec
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.slurm import ScontrolClient
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts


def main(run_dir: Path, nodes: int, spares: int, slots: int) -> int:
    directory = RunDir(run_dir)
    lock = directory.claim()
    names = tuple(f"node{index:05d}" for index in range(nodes + spares))
    program = msg.Program(kind=msg.ProgramKind.SCRIPT, target="train.py", args=[], cwd="/")
    agents = Path(__file__).with_name("agents.py")
    spec = JobSpec(
        job_id="1",
        restart_count=0,
        submitted=0,
        host="localhost",
        address="127.0.0.1",
        policy=Policy(nodes=names, active_nodes=nodes, max_restarts=100),
        welcome=msg.Welcome(
            program=program,
            job_id="1",
            run_dir=str(run_dir),
            nproc_per_node=str(slots),
            warm_start=True,
            max_restarts=100,
            stop_timeout_s=15.0,
        ),
        monitoring=Monitoring(heartbeat=HeartbeatTimeouts(), section=SectionTimeouts()),
        keep_timeouts=False,
        run_dir=directory,
        slurm=ScontrolClient(),
        step_argv=[sys.executable, str(agents), str(nodes + spares), str(slots)],
        step_environ=dict(os.environ),
    )
    code = run_job(spec)
    os.close(lock)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:5])))
