"""Nodes that come back to a real Slurm job: after a killed agent, a cut cable, a power loss."""

from __future__ import annotations

import pytest

from nvrx_slurm.journal import CycleStarted, FirstStep, NodeGivenUp, NodeJoined, NodeLost, Verdict

from .jobs import SlurmJob, SlurmJobs, wait_until

pytestmark = pytest.mark.slurm


def _train(slurm: SlurmJobs, steps: int, *options: str, nodes: int, spares: int) -> SlurmJob:
    gpus = ("--gpus-per-node=2",)
    return slurm.train(steps, "--nproc-per-node=auto", *options, nodes=nodes, spares=spares, sbatch=gpus)


def _wait_for_return(job: SlurmJob, node: str) -> None:
    def is_back() -> bool:
        return any(r.event.returned and r.event.node == node for r in job.events(NodeJoined))

    wait_until(f"{node} is back\n{job.log()}", is_back)


def _with_agents(job: SlurmJob) -> set[str]:
    there: set[str] = set()
    for record in job.records():
        match record.event:
            case NodeJoined(node=node):
                there.add(node)
            case NodeLost(node=node):
                there.discard(node)
            case _:
                pass
    return there


def _last_started(job: SlurmJob) -> CycleStarted:
    event = job.events(CycleStarted)[-1].event
    assert isinstance(event, CycleStarted)
    return event


def test_a_killed_agent_without_a_spare_heals_in_the_same_allocation(slurm: SlurmJobs) -> None:
    job = _train(slurm, 120, nodes=2, spares=0)
    job.wait_for_training(cycle=0)
    nodes = job.active_nodes()
    slurm.cluster.exec(nodes[1], ["pkill", "-KILL", "-x", "nvrx-agent"], check=True)
    job.wait_for(FirstStep, cycle=1)
    # Two ranks a node again: the new step has the node's GPUs as the first one had.
    assert (job.active_nodes(), _last_started(job).world_size) == (nodes, 4)
    assert job.slurm_fields()["Restarts"] == "0"
    assert job.wait_for_end() == 0, job.log()
    assert sorted(job.curve()) == list(range(1, 121))
    assert len(job.events(Verdict)) == 1
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))


def test_a_node_that_was_cut_off_for_a_while_comes_back_as_a_spare(slurm: SlurmJobs) -> None:
    job = _train(slurm, 2000, nodes=4, spares=1)
    job.wait_for_training(cycle=0)
    cut_off = job.active_nodes()[1]
    slurm.cluster.partition_node(cut_off)
    job.wait_for(FirstStep, cycle=1)
    slurm.cluster.restore_node(cut_off)
    _wait_for_return(job, cut_off)
    # Nothing restarts because of that, and when another is lost it takes its place.
    assert job.events(CycleStarted)[-1].cycle == 1
    lost = job.active_nodes()[2]
    slurm.cluster.exec(lost, ["pkill", "-KILL", "-x", "nvrx-agent"], check=True)
    job.wait_for(FirstStep, cycle=2)
    assert job.active_nodes()[2] == cut_off
    slurm.run("scancel", job.job_id)
    job.wait_for_end()
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))


def test_a_node_that_lost_power_comes_back_to_the_job_if_slurm_has_not_missed_it(slurm: SlurmJobs) -> None:
    job = _train(slurm, 2000, nodes=3, spares=1)
    job.wait_for_training(cycle=0)
    lost = job.active_nodes()[1]
    slurm.cluster.kill_node(lost)
    job.wait_for(NodeLost, cycle=0)
    slurm.cluster.restore_node(lost, unnoticed=True)
    _wait_for_return(job, lost)
    # srun ends its whole step when a node of it has rebooted: the others have new agents too, then.
    wait_until(
        f"all three nodes have agents, and two train\n{job.log()}",
        lambda: (
            len(_with_agents(job)) == 3
            and job.events(FirstStep)[-1].cycle == job.events(CycleStarted)[-1].cycle
        ),
    )
    assert job.slurm_fields()["Restarts"] == "0"
    slurm.run("scancel", job.job_id)
    job.wait_for_end()
    slurm.wait_until_nothing_is_left([node for node in slurm.cluster.node_names if node != lost])
    # Booted anew its slurmd has another command line.
    wait_until("nothing but slurmd", lambda: not any("nvrx" in c for c in slurm.left_on(lost)))


def test_a_node_that_slurm_has_taken_out_of_the_job_is_given_up(slurm: SlurmJobs) -> None:
    job = _train(slurm, 150, nodes=3, spares=1)
    job.wait_for_training(cycle=0)
    lost = job.active_nodes()[1]
    slurm.cluster.kill_node(lost)
    job.wait_for(FirstStep, cycle=1)
    slurm.cluster.restore_node(lost)
    wait_until("it is given up", lambda: bool(job.events(NodeGivenUp)))
    given_up = job.events(NodeGivenUp)[0].event
    assert isinstance(given_up, NodeGivenUp)
    assert (given_up.node, given_up.why) == (lost, "Slurm has taken it out of the job")
    assert job.wait_for_end() == 0, job.log()
    slurm.wait_until_nothing_is_left([node for node in slurm.cluster.node_names if node != lost])
