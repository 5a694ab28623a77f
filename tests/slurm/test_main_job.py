"""The main job on a real Slurm cluster: it survives what it should, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.journal import (
    CheckpointLoaded,
    CheckpointSaved,
    FaultKind,
    FirstStep,
    JobEnded,
    NodeLost,
    NotRequeued,
    Requeued,
    StopRequested,
    Verdict,
)

from .jobs import CLONE, SlurmJobs, wait_until

pytestmark = pytest.mark.slurm

_STEPS = 160


@pytest.fixture(scope="module")
def undisturbed(five_node_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    jobs = SlurmJobs(five_node_cluster, tmp_path_factory.mktemp("undisturbed"))
    try:
        job = jobs.train(_STEPS, nodes=4, spares=0, name="undisturbed")
        assert job.wait_for_end() == 0, job.log()
        expected = job.curve()
    finally:
        jobs.clean_up()
    assert sorted(expected) == list(range(1, _STEPS + 1))
    return expected


def test_a_killed_rank_a_hung_rank_and_a_lost_node_leave_the_loss_curve_as_it_is(
    slurm: SlurmJobs, undisturbed: dict[int, float]
) -> None:
    # when rank 3 is killed, rank 5 hangs, and the node at group rank 1 loses power
    job = slurm.train(_STEPS, "--heartbeat-timeout=5s", nodes=5, spares=1, name="disturbed")
    job.wait_for_training(cycle=0)
    killed_on = job.signal_rank(3, signal.SIGKILL)
    job.wait_for_training(cycle=1)
    hung_on = job.signal_rank(5, signal.SIGSTOP)
    job.wait_for_training(cycle=2)
    lost = job.active_nodes()[1]
    slurm.cluster.kill_node(lost)
    job.wait_for(FirstStep, cycle=3)
    code = job.wait_for_end()

    # then the job succeeds with the same losses, step for step
    assert code == 0, job.log()
    assert job.curve() == undisturbed

    # and the report names each culprit
    report = json.loads(
        subprocess.run(
            [CLONE / "bin" / "nvrx-report", "--json", job.run_dir],
            capture_output=True,
            check=True,
            timeout=240,
        ).stdout
    )
    causes = [cycle["cause"] for cycle in report["cycles"]]
    assert [(c["kind"], c["node"], c["rank"]) for c in causes[:3]] == [
        ("signal", killed_on, 3),
        ("hang", hung_on, 5),
        ("node_lost", lost, None),
    ]
    assert causes[3] is None
    attributed = [cycle["attribution"] for cycle in report["cycles"][:3]]
    assert [(a["category"], a["culprits"][0]["rank"], a["culprits"][0]["node"]) for a in attributed] == [
        ("host.sigkill", 3, killed_on),
        ("job.hang", 5, hung_on),
        ("slurm.node_fail", None, lost),
    ]
    assert [a["exclude"] for a in attributed] == [[], [], [lost]]
    verdicts = [record.event for record in job.events(Verdict)]
    assert [v.kind for v in verdicts] == [FaultKind.SIGNAL, FaultKind.HANG, FaultKind.NODE_LOST]

    # and no process is left
    slurm.wait_until_nothing_is_left([node for node in slurm.cluster.node_names if node != lost])


def test_a_lost_node_without_a_spare_ends_the_job_with_75_and_says_why(slurm: SlurmJobs) -> None:
    job = slurm.train(2000, "--rejoin-timeout=5s", nodes=2, spares=0, sbatch=("--no-requeue",))
    job.wait_for_training(cycle=0)
    lost = next(node for node in job.active_nodes() if node != job.slurm_fields()["BatchHost"])
    slurm.cluster.kill_node(lost)
    code = job.wait_for_end()
    ended = job.events(JobEnded)[-1].event
    assert code == ended.code == 75, job.log()
    assert "too few nodes" in ended.why
    assert lost in ended.why
    assert "--no-requeue" in job.events(NotRequeued)[-1].event.why
    slurm.wait_until_nothing_is_left([node for node in slurm.cluster.node_names if node != lost])


def test_too_few_nodes_requeue_the_job_without_the_lost_one_and_training_resumes(slurm: SlurmJobs) -> None:
    # given nodes that train, others that are free, and a node that the user has excluded already
    job = slurm.train(200, "--rejoin-timeout=5s", nodes=2, spares=0, sbatch=("--exclude=n5",))
    job.wait_for_training(cycle=0, steps=15)
    lost = next(node for node in job.active_nodes() if node != job.slurm_fields()["BatchHost"])

    # when a node is lost
    slurm.cluster.kill_node(lost)

    # then the same job starts again elsewhere, and goes on from its checkpoint
    requeued = job.wait_for(Requeued, cycle=1).event
    assert set(requeued.excluded) == {"n5", lost}
    resumed = job.wait_for(CheckpointLoaded, cycle=1)
    assert resumed.attempt == 1
    assert lost not in job.active_nodes()
    assert job.wait_for_end() == 0, job.log()
    assert sorted(job.curve()) == list(range(1, 201))


def test_a_partitioned_node_is_replaced_and_kills_its_own_ranks(slurm: SlurmJobs) -> None:
    job = slurm.train(150, nodes=3, spares=1)
    job.wait_for_training(cycle=0)
    cut_off = job.active_nodes()[1]
    assert slurm.left_on(cut_off)
    slurm.cluster.partition_node(cut_off)
    began = time.monotonic()
    job.wait_for(FirstStep, cycle=1)
    # The cut-off side must not go on: it has 10 s from the cut, and what a busy machine adds.
    wait_until(
        "the cut-off node has no rank",
        lambda: not any("worker_server" in command for command in slurm.left_on(cut_off)),
        max(0.0, 30 - (time.monotonic() - began)),
    )
    assert job.wait_for_end() == 0, job.log()
    assert sorted(job.curve()) == list(range(1, 151))


def test_nothing_is_left_after_scancel(slurm: SlurmJobs) -> None:
    job = slurm.train(2000, nodes=3, spares=1)
    job.wait_for_training(cycle=0)
    slurm.run("scancel", job.job_id)
    job.wait_for_end()
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))
    assert job.events(JobEnded)[-1].event.code == 128 + signal.SIGTERM
    said = job.attribution(0)
    assert (said["primary"]["category"], said["decision"]["rule"]) == ("slurm.cancelled", "1-over")


def test_w20_nothing_is_left_after_nvrx_srun_was_killed(slurm: SlurmJobs) -> None:
    job = slurm.train(2000, nodes=3, spares=1)
    job.wait_for_training(cycle=0)
    host = job.slurm_fields()["BatchHost"]
    slurm.cluster.exec(host, ["pkill", "-KILL", "-f", "bin/nvrx-srun"], check=True)
    job.wait_for_end()
    assert job.slurm_fields()["JobState"] == "FAILED"
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))


@pytest.mark.parametrize("process", ["nvrx-agent", "nvrx-guardian", "nvrx-warm"])
def test_a_killed_agent_costs_its_node_and_leaves_nothing(slurm: SlurmJobs, process: str) -> None:
    job = slurm.train(120, "--rejoin-timeout=0", nodes=3, spares=1)
    job.wait_for_training(cycle=0)
    node = job.active_nodes()[1]
    slurm.cluster.exec(node, ["pkill", "-KILL", "-x", process], check=True)
    job.wait_for(FirstStep, cycle=1)
    if process != "nvrx-warm":
        slurm.wait_until_nothing_is_left([node])
    assert job.wait_for_end() == 0, job.log()
    assert sorted(job.curve()) == list(range(1, 121))
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))


def test_a_signal_before_the_time_limit_saves_and_ends_with_75(slurm: SlurmJobs) -> None:
    job = slurm.train(2000, nodes=2, spares=0, sbatch=("--no-requeue",))
    job.wait_for_training(cycle=0)
    slurm.run("scancel", "--batch", "--signal=USR2", job.job_id)
    assert job.wait_for_end() == 75, job.log()
    last_step, _ = job.losses()[-1]
    checkpoints = sorted((job.run_dir / "train").glob("*.pt"))
    assert any(str(last_step) in path.name for path in checkpoints), (last_step, checkpoints)
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))


def test_before_its_time_limit_a_job_without_a_signal_saves_is_requeued_and_goes_on(slurm: SlurmJobs) -> None:
    # given a job of one minute that needs hours, and that Slurm was not asked to signal
    job = slurm.train(10**6, "--time-limit-margin=40s", nodes=2, spares=0, sbatch=("--time=1",))
    # when its time is nearly over
    asked = job.wait_for(StopRequested, 0)
    # then it saves, and Slurm starts it again, where it goes on from there
    assert asked.event.by.startswith("the time limit, ")
    assert job.wait_for(JobEnded, 0).event.code == 75
    assert job.wait_for(Requeued, 0).event.excluded == []
    said = job.attribution(0)
    assert (said["primary"]["category"], said["decision"]["action"]) == ("slurm.time_limit", "restart")
    saved = [record.event.step for record in job.events(CheckpointSaved)]
    assert job.wait_for(CheckpointLoaded, 1).event.step == saved[-1]


def test_after_a_lost_node_training_resumes_from_the_copies_in_the_memory_of_others(
    slurm: SlurmJobs, undisturbed: dict[int, float]
) -> None:
    # given checkpoints in the nodes' memory, and none on shared disk before step 50
    job = slurm.train(_STEPS, nodes=5, spares=1, program=("--ckpt=ladder",))
    job.wait_for_training(cycle=0, steps=25)

    # when a node is lost with all that is in its memory
    lost = job.active_nodes()[1]
    slurm.cluster.kill_node(lost)

    # then the spare that takes its place has its state from another node
    resumed = job.wait_for(CheckpointLoaded, cycle=1).event
    assert resumed.layer == "local"
    assert resumed.step >= 20
    assert resumed.why.startswith("the newest that is whole; shared has ")
    assert lost not in job.active_nodes()
    assert job.wait_for_end() == 0, job.log()
    assert job.curve() == undisturbed

    # and nothing stays in the memory of the nodes
    for node in slurm.cluster.node_names:
        if node != lost:
            names = ["find", "/dev/shm", "-name", f"nvrx-*-{job.job_id}-ram-*"]
            assert slurm.cluster.exec(node, names, capture_output=True, check=True).stdout == b""


def test_a_node_that_comes_back_with_an_empty_disk_gets_its_parts_from_another(
    slurm: SlurmJobs, undisturbed: dict[int, float]
) -> None:
    # given checkpoints on the nodes' own disks alone, and no spare
    parts = "/local/parts"
    options = ("--rejoin-timeout=120s", "--max-no-progress-cycles=0")
    job = slurm.train(_STEPS, *options, nodes=4, spares=0, program=("--ckpt=local", f"--local-dir={parts}"))
    job.wait_for_training(cycle=0, steps=25)

    # when a node is lost and comes back wiped
    lost = next(node for node in job.active_nodes() if node != job.slurm_fields()["BatchHost"])
    slurm.cluster.kill_node(lost)
    job.wait_for(NodeLost, cycle=0)
    saved = max(record.event.step for record in job.events(CheckpointSaved))
    slurm.cluster.restore_node(lost, wipe_local=True, unnoticed=True)

    # then training goes on with it from the newest whole checkpoint, each state to the last bit
    wait_until(f"it goes on\n{job.log()}", lambda: bool(job.events(CheckpointLoaded)))
    resumed = job.events(CheckpointLoaded)[0].event
    assert resumed.layer == "local"
    assert saved <= resumed.step <= saved + 10
    assert lost in job.active_nodes()
    assert job.wait_for_end() == 0, job.log()
    assert job.curve() == undisturbed
    found = slurm.cluster.exec(lost, ["find", parts, "-name", "iter_*"], capture_output=True, check=True)
    assert f"iter_{_STEPS:07d}_".encode() in found.stdout
    for node in slurm.cluster.node_names:
        slurm.cluster.exec(node, ["rm", "-rf", parts], check=True)
