"""Nodes that lose their agent and get another, and nodes that keep theirs, with real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import RANK, LocalJob, is_alive, until

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind

Jobs = Callable[..., LocalJob]
QUICK = ("--warm-start", "off", "--workers-stop-timeout", "300ms")

TRAINS = (
    RANK
    + """
local = os.environ["LOCAL_RANK"]
write(f"ready{rank}.{cycle}", os.environ["CUDA_VISIBLE_DEVICES"] + "/" + local)
wait_for(f"end{cycle}")
"""
)
"""Each rank tells its devices, and ends when it is told to."""


def train(job: Jobs, *options: str, **keywords: object) -> LocalJob:
    """A job whose ranks have devices as Slurm gives them to a step."""
    run = job(TRAINS, *QUICK, *options, **keywords)
    run.environment_of_agents(CUDA_VISIBLE_DEVICES="GPU-b,GPU-a")
    return run.start()


def ready(run: LocalJob, cycle: int, ranks: int = 2) -> list[str]:
    return [run.wait_for_file(f"ready{rank}.{cycle}") for rank in range(ranks)]


def srun_calls(run: LocalJob) -> list[str]:
    return (run.root / "srun_calls").read_text().splitlines()


@pytest.mark.parametrize("killed", ["nvrx-agent", "nvrx-guardian"])
def test_a_killed_agent_without_a_spare_heals_in_the_same_job(job: Jobs, killed: str) -> None:
    # given two nodes that train, and no spare
    run = train(job, nodes=2, ranks=1)
    ready(run, 0)
    before = run.on("n2")
    # when one loses its agent
    run.named(killed, "n2").kill()
    # then it has another, at its old place, and nothing of the former cycle is left there
    ready(run, 1)
    assert not [process for process in before if is_alive(process)]
    assert [cycle.nodes for cycle in run.events(journal.CycleStarted)] == [["n1", "n2"]] * 2
    assert [event.node for event in run.events(journal.NodeJoined) if event.returned] == ["n2"]
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.kind, verdict.node) == (FaultKind.NODE_LOST, "n2")
    # by a step of its own, beside the first
    assert len(srun_calls(run)) == 2
    assert "--overlap" in srun_calls(run)[1]
    assert "-w n2" in srun_calls(run)[1]
    run.touch("end1")
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_w09_an_agent_restarted_on_the_same_node_within_one_cycle_is_taken_as_a_spare(job: Jobs) -> None:
    run = train(job, "--spares", "1", nodes=3, ranks=1)
    ready(run, 0)
    run.named("nvrx-agent", "n2").kill()
    run.wait_for(journal.CycleStarted, 2)
    until("n2 is back", lambda: [e for e in run.events(journal.NodeJoined) if e.returned])
    assert [cycle.nodes for cycle in run.events(journal.CycleStarted)] == [["n1", "n2"], ["n1", "n3"]]
    # It is a spare like any other.
    run.named("nvrx-agent", "n1").kill()
    assert run.wait_for(journal.CycleStarted, 3).nodes == ["n2", "n3"]
    run.touch("end1"), run.touch("end2")
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_w08_an_agent_that_dies_as_soon_as_it_has_joined_is_no_ghost(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, "--spares", "1", nodes=3, ranks=1, TEST_ABSENT_NODES="n3")
    run.environment_of_agents(CUDA_VISIBLE_DEVICES="0")
    run.start()
    until("n2 has joined", lambda: "n2" in [event.node for event in run.events(journal.NodeJoined)])
    run.named("nvrx-agent", "n2").kill()
    run.wait_for(journal.NodeLost)
    started = until(
        "a cycle with the new agent",
        lambda: [r for r in run.records if isinstance(r.event, journal.CycleStarted) and r.ts > lost_at(run)],
    )
    assert started[-1].event.nodes == ["n1", "n2"]
    cycle = started[-1].cycle
    ready(run, cycle)
    run.touch(f"end{cycle}")
    assert run.wait() == 0
    assert run.nothing_is_left()


def lost_at(run: LocalJob) -> float:
    return next(record.ts for record in run.records if isinstance(record.event, journal.NodeLost))


def test_a_node_that_slurm_has_taken_out_of_the_job_is_not_waited_for(job: Jobs) -> None:
    run = train(job, nodes=2, ranks=1)
    ready(run, 0)
    (run.slurm / "nodes").write_text("n1\n")
    run.named("nvrx-agent", "n2").kill()
    assert run.wait() == 75
    (given_up,) = run.events(journal.NodeGivenUp)
    assert (given_up.node, given_up.why) == ("n2", "Slurm has taken it out of the job")
    assert "node n2 stays away" in run.stderr
    assert run.nothing_is_left()


def test_a_node_that_does_not_come_back_in_time_ends_the_job_with_75(job: Jobs) -> None:
    run = train(job, "--rejoin-timeout", "2s", nodes=2, ranks=1)
    ready(run, 0)
    (run.slurm / "node_state").write_text("ALLOCATED+DRAIN\n")
    run.named("nvrx-agent", "n2").kill()
    assert run.wait() == 75
    assert len(srun_calls(run)) == 1, "a node that is being drained gets no agent"
    assert run.nothing_is_left()


def test_a_node_that_loses_one_agent_after_the_other_is_left_out(job: Jobs) -> None:
    run = train(job, nodes=2, ranks=1)
    for cycle in range(3):
        ready(run, cycle)
        run.named("nvrx-agent", "n2").kill()
    assert run.wait() == 75
    (excluded,) = run.events(journal.NodeExcluded)
    assert (excluded.node, excluded.reason) == ("n2", "it has lost its agent 3 times")
    assert run.nothing_is_left()


def test_w11_a_node_that_is_slow_to_stop_is_not_replaced_by_a_spare(job: Jobs) -> None:
    script = (
        RANK
        + """
if rank == 1:
    def slowly(*_):
        time.sleep(4)
        os._exit(0)
    signal.signal(signal.SIGTERM, slowly)
write(f"ready{rank}.{cycle}")
if rank == 0 and not cycle:
    wait_for("ready1.0")
    sys.exit(3)
wait_for("end")
"""
    )
    run = job(script, "--warm-start", "off", "--spares", "1", nodes=3, ranks=1).start()
    run.wait_for_file("ready0.1"), run.wait_for_file("ready1.1")
    assert [cycle.nodes for cycle in run.events(journal.CycleStarted)] == [["n1", "n2"]] * 2
    (stopped,) = run.events(journal.WorkersStopped)
    assert stopped.seconds > 3.9
    run.touch("end")
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_local_rank_and_devices_stay_together_over_cycles_and_agents(job: Jobs) -> None:
    # given the devices in Slurm's own order
    run = train(job, nodes=2, ranks=2)
    devices = ready(run, 0, ranks=4)
    assert devices == ["GPU-b,GPU-a/0", "GPU-b,GPU-a/1"] * 2
    # when a rank is killed, and then an agent
    run.rank(2).kill()
    assert ready(run, 1, ranks=4) == devices
    run.named("nvrx-agent", "n2").kill()
    assert ready(run, 2, ranks=4) == devices
    run.touch("end2")
    assert run.wait() == 0


def test_ranks_are_in_the_order_of_switches_and_segments_are_of_one_domain(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, "--ft-segment", "2", "--nnodes", "4:4", nodes=4, ranks=1)
    # Each agent has its own: the stand-in for srun gives all the same environment.
    run.environment_of_agents(
        CUDA_VISIBLE_DEVICES="0",
        PER_NODE_SLURM_TOPOLOGY_ADDR="n1=s1.n1 n2=s2.n2 n3=s1.n3 n4=s2.n4",
        SLURM_TOPOLOGY_ADDR_PATTERN="switch.node",
        PER_NODE_NVRX_DOMAIN_ID="n1=east n2=west n3=east n4=west",
    )
    run.start()
    ready(run, 0, ranks=4)
    assert run.events(journal.CycleStarted)[0].nodes == ["n1", "n3", "n2", "n4"]
    # A new agent tells the same of its node.
    run.named("nvrx-agent", "n2").kill()
    assert run.wait_for(journal.CycleStarted, 2).nodes == ["n1", "n3", "n2", "n4"]
    ready(run, 1, ranks=4)
    run.touch("end1")
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_segments_on_nodes_without_a_domain_are_refused_with_the_reason(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, "--ft-segment", "2", nodes=2, ranks=1, NVRX_DOMAIN_ID="N/A")
    assert run.run() == 2
    assert "no NVLink domain: NVRX_DOMAIN_ID='N/A' is a placeholder" in run.stderr
    assert "no node tells its own" in run.stderr
    assert run.nothing_is_left()
