"""What the node does that has taken charge of a job whose Coordinator's host was lost."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nvrx_slurm import journal
from nvrx_slurm.coordinator.address import address_toward
from nvrx_slurm.coordinator.handover import Handover, JobState, job_state
from nvrx_slurm.coordinator.job_end import start_again
from nvrx_slurm.coordinator.job_spec import JobSpec, Succession
from nvrx_slurm.coordinator.lease import Lease, LeaseFile
from nvrx_slurm.coordinator.past import past_of_job
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.coordinator.successor import Won
from nvrx_slurm.interpreter import console_script
from nvrx_slurm.journal import FaultDetected, FaultKind, JournalWriter, iterate_journal
from nvrx_slurm.slurm import SlurmClient

_JOIN_TIMEOUT_S = 60.0
"""The other agents are there already, and look every few seconds."""
_RESTART_ELSEWHERE = 75


def requeue_job(won: Won, node: str, run_dir: RunDir, handover: Handover, slurm: SlurmClient) -> bool:
    """Have Slurm start the job again without the lost host; tell whether it will.

    Raises:
        OSError, JournalVersionError: the journal can't be read or written.
    """
    cycle = max(0, _state_of(run_dir, handover).next_cycle - 1)
    log = JournalWriter(run_dir.journal, handover.job_id, handover.restart_count)
    fault = FaultDetected(kind=FaultKind.NODE_LOST, node=won.lost, detector="lease", detail=won.why)
    for event in (
        journal.CoordinatorLost(
            host=won.lost, successor=node, fence=str(won.fence), silent_s=round(won.silent_s, 3)
        ),
        fault,
        journal.Verdict(
            action=journal.VerdictAction.STOP,
            rule="node-lost",
            why=won.why,
            node=fault.node,
            kind=fault.kind,
        ),
        journal.JobEnded(code=_RESTART_ELSEWHERE, why=won.why),
    ):
        log.append(cycle, event)
    outcome = start_again(slurm, handover.job_id, [won.lost])
    log.append(cycle, outcome)
    log.close()
    # For the other nodes, and for the old Coordinator if it wakes.
    ended = Lease(fence=str(won.fence), counter=1, host=node, ended=_RESTART_ELSEWHERE)
    LeaseFile(run_dir.path).write(ended)
    return isinstance(outcome, journal.Requeued)


def specification(
    won: Won,
    node: str,
    token: str,
    run_dir: RunDir,
    handover: Handover,
    slurm: SlurmClient,
    environ: Mapping[str, str],
) -> JobSpec:
    """Return the job as it goes on from here, coordinated by ``node``.

    Args:
        environ: of this node's agent.

    Raises:
        OSError, JournalVersionError: the journal can't be read.
        NoAddressError: this host can't be reached by the others.
    """
    state = _state_of(run_dir, handover)
    policy, program = handover.policy, handover.welcome.program
    left = [other for other in policy.nodes if other != won.lost and other not in state.excluded]
    past = past_of_job(
        run_dir.journal, handover.job_id, handover.restart_count, [program.target, *program.args]
    )
    return JobSpec(
        job_id=handover.job_id,
        restart_count=handover.restart_count,
        submitted=handover.submitted,
        host=node,
        address=address_toward([other for other in left if other != node] or [node], slurm.node_address),
        policy=replace(
            policy,
            last_choice=node if len(set(left) - state.lost) > policy.active_nodes else None,
            # Lost nodes stay away: the srun options that a new agent would need are not handed over.
            rejoin_timeout_s=0.0,
            first_cycle=state.next_cycle,
            past=past,
            join_timeout_s=_JOIN_TIMEOUT_S,
            host=node,
        ),
        welcome=handover.welcome,
        monitoring=state.monitoring or handover.monitoring,
        keep_timeouts=handover.keep_timeouts,
        run_dir=run_dir,
        slurm=slurm,
        step_argv=[console_script("nvrx-agent")],
        step_environ=environ,
        iteration_file=_path(handover.iteration_file),
        cycle_info_dir=_path(handover.cycle_info_dir),
        applog_prefix=_path(handover.applog_prefix),
        attribution=handover.attribution,
        attribution_endpoint=handover.attribution_endpoint,
        ends=handover.ends,
        time_limit_margin_s=handover.time_limit_margin_s,
        standby=True,
        succession=Succession(
            fence=won.fence,
            token=token,
            lost=won.lost,
            silent_s=won.silent_s,
            restarts=state.restarts,
            excluded=state.excluded,
            gone=frozenset(state.lost | state.excluded.keys()),
        ),
    )


def continue_output(handover: Handover, run_dir: RunDir) -> None:
    """Have what this process prints go on where the lost Coordinator's did: the srun of its host is gone.

    Without such a file, or where it can't be written from here: ``coordinator.log`` in the run directory.

    Raises:
        OSError: that can't be written either.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = None
    if handover.output:
        with contextlib.suppress(OSError):
            fd = os.open(handover.output, flags)
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                os.close(fd)
                fd = None
    if fd is None:
        fd = os.open(run_dir.path / "coordinator.log", flags | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _state_of(run_dir: RunDir, handover: Handover) -> JobState:
    records = iterate_journal(run_dir.journal)
    return job_state(records, handover.restart_count, handover.monitoring)
