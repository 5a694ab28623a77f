"""Processes of ours that die, stand still or cannot be started, and what becomes of a job; real processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import psutil
import pytest
from harness import RANK, LocalJob, is_alive, until
from programs import BREEDS, COLD, QUICK_STOP, STAY_AWAY, WAITS

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind

Jobs = Callable[..., LocalJob]


def test_w20_a_dead_agent_is_a_lost_node_and_the_guardian_clears_up(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, *QUICK_STOP, *STAY_AWAY, nodes=3, ranks=1).start()
    for rank in range(3):
        run.wait_for_file(f"ready{rank}.0")
    on_n3 = run.on("n3")
    run.named("nvrx-agent", "n3").kill()
    assert run.wait() == 75
    # The job does not wait for the guardian of a node that it has lost.
    until("n3 has cleared up", lambda: not [process for process in on_n3 if is_alive(process)])
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.kind, verdict.node) == (FaultKind.NODE_LOST, "n3")
    assert run.nothing_is_left()


def test_a_spare_takes_the_place_of_a_dead_agent(job: Jobs) -> None:
    script = WAITS.replace("while True", "while not cycle")
    run = job(script, *COLD, "--spares", "1", nodes=3, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.named("nvrx-agent", "n1").kill()
    second = run.wait_for(journal.CycleStarted, 2)
    assert second.nodes == ["n3", "n2"]
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_a_dead_guardian_takes_its_node_along_in_good_order(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, *QUICK_STOP, *STAY_AWAY, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.named("nvrx-guardian", "n2").kill()
    assert run.wait() == 75
    assert run.nothing_is_left()


def test_a_worker_server_that_is_stopped_is_continued(job: Jobs) -> None:
    run = job(RANK + 'wait_for("end") if cycle == 0 and rank == 0 else None').start()
    rank = run.rank(0)
    server = run.named("nvrx-warm")
    server.suspend()
    until("it is seen", lambda: "somebody has stopped the worker server" in run.stderr)
    until("the server goes on", lambda: server.status() != psutil.STATUS_STOPPED)
    rank.kill()
    assert run.wait() == 0
    assert "somebody has stopped the worker server: continued" in run.stderr
    assert [fault.signal for fault in run.events(journal.FaultDetected)] == ["SIGKILL"]


@pytest.mark.parametrize("warm", ["on", "off"])
def test_a_dead_worker_server_is_replaced_on_the_same_node(job: Jobs, warm: str) -> None:
    script = BREEDS + WAITS.replace("while True", "while not cycle")
    run = job(script, "--warm-start", warm, *QUICK_STOP, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.named("nvrx-warm", "n2").kill()
    assert run.wait() == 0
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.kind, verdict.rank) == (FaultKind.SIGNAL, 1)
    assert "worker server" in verdict.why
    assert [started.nodes for started in run.events(journal.CycleStarted)] == [["n1", "n2"]] * 2
    assert run.nothing_is_left()


def test_an_agent_that_is_asked_to_go_stops_the_others_before_its_own_ranks_have_ended(job: Jobs) -> None:
    script = (
        RANK
        + """
def save(*_):
    write(f"saves{rank}")
    if rank == 1:
        wait_for("go_on")
    write(f"saved{rank}")
    sys.exit(0)

if cycle == 0:
    signal.signal(signal.SIGTERM, save)
    write(f"ready{rank}")
    while True:
        time.sleep(60)
"""
    )
    run = job(script, *COLD, "--spares", "1", nodes=3, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    run.named("nvrx-agent", "n2").send_signal(signal.SIGTERM)
    run.wait_for_file("saves1"), run.wait_for_file("saved0")
    assert len(run.events(journal.CycleStarted)) == 1, "ranks of the former cycle are still there"
    run.touch("go_on")
    assert run.wait() == 0
    assert (run.root / "saved1").exists()
    assert run.events(journal.CycleStarted)[1].nodes == ["n1", "n3"]
    (verdict,) = run.events(journal.Verdict)
    assert verdict.why == "node n2 lost (the agent received SIGTERM)"
    assert run.nothing_is_left()


def test_what_an_agent_says_last_is_heard_however_soon_it_goes(job: Jobs) -> None:
    script = (
        RANK
        + """
write(f"ready{rank}")
wait_for("go_on")
"""
    )
    run = job(script, *COLD, "--spares", "3", nodes=4, ranks=1).start()
    run.wait_for_file("ready0")
    for node in ("n2", "n3", "n4"):
        run.named("nvrx-agent", node).send_signal(signal.SIGTERM)
    run.wait_for(journal.NodeLost, 3)
    assert {lost.why for lost in run.events(journal.NodeLost)} == {"the agent received SIGTERM"}
    run.touch("go_on")
    assert run.wait() == 0


def test_a_worker_server_that_dies_at_once_is_not_started_over_and_over(job: Jobs) -> None:
    run = job(WAITS, *COLD, "--max-restarts", "1", ranks=1)
    (run.root / "site").mkdir()
    (run.root / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'nvrx_slurm.agent.worker_server' in sys.orig_argv:\n"
        f"    open('{run.root}/starts', 'a').write('x')\n"
        "    os._exit(1)\n"
    )
    run.environment_of_agents(PYTHONPATH=f"{run.root}/site:{run.stub_torch}")
    assert run.run() == 1
    assert "worker server" in run.events(journal.JobEnded)[0].why
    assert len(run.wait_for_file("starts")) < 8
    assert run.nothing_is_left()


def test_w20_nothing_survives_a_dead_coordinator(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert run.nothing_is_left()


def test_a_job_goes_on_without_its_srun(job: Jobs) -> None:
    script = (
        RANK
        + """
write(f"ready{rank}")
wait_for("go_on")
"""
    )
    run = job(script, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    srun = run.running("stand_ins/srun")
    srun.kill()
    until("srun has ended", lambda: not is_alive(srun))
    run.touch("go_on")
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_a_dead_store_restarts_all_ranks_with_a_new_one(job: Jobs) -> None:
    script = (
        RANK
        + """
import torch.distributed as dist

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"here{rank}", "yes")
store.wait(["here0", "here1"])
write(f"met{rank}.{cycle}", os.environ["MASTER_PORT"])
while not cycle:
    time.sleep(60)
"""
    )
    run = job(script, *COLD, nodes=2, ranks=1, real_torch=True).start()
    first = run.wait_for_file("met0.0"), run.wait_for_file("met1.0")
    run.running("store_process").kill()
    assert run.wait() == 0
    second = run.wait_for_file("met0.1"), run.wait_for_file("met1.1")
    assert first[0] == first[1]
    assert second[0] == second[1] != first[0]
    (verdict,) = run.events(journal.Verdict)
    assert "rendezvous store" in verdict.why
    assert run.nothing_is_left()


# --- nodes that do not answer ------------------------------------------------------------------------


def test_a_silent_node_is_lost_and_ends_its_ranks_when_it_wakes(job: Jobs) -> None:
    script = (
        BREEDS
        + """
write(f"ready{rank}.{cycle}")
wait_for("go_on")
"""
    )
    run = job(script, *COLD, "--spares", "1", *QUICK_STOP, nodes=3, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    agent = run.named("nvrx-agent", "n2")
    on_n2 = run.on("n2")
    agent.suspend()
    # 4.5 s where the machine has time.
    second = run.wait_for(journal.CycleStarted, 2)
    assert second.nodes == ["n1", "n3"]
    with contextlib.suppress(psutil.NoSuchProcess):  # its guardian may have lost patience with it
        agent.resume()
    until("n2 has cleared up", lambda: not [p for p in on_n2 if is_alive(p)])
    run.touch("go_on")
    assert run.wait() == 0
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.kind, verdict.node) == (FaultKind.NODE_LOST, "n2")
    assert run.nothing_is_left()


def test_a_silent_coordinator_is_given_up_by_its_agents(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, *QUICK_STOP, *STAY_AWAY, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.signal(signal.SIGSTOP)
    until("no rank is left", lambda: not run.ranks(0, 1))
    run.signal(signal.SIGCONT)
    assert run.wait() == 75
    assert run.nothing_is_left()


# --- what cannot be started --------------------------------------------------------------------------


def test_a_store_that_cannot_come_up_fails_the_job_with_its_words(job: Jobs) -> None:
    run = job(WAITS, *COLD, "--max-restarts", "1", ranks=1)
    broken = run.root / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libtorch.so: file too short')")
    run.environment_of_coordinator(PYTHONPATH=str(broken.parent))
    assert run.run() == 1
    assert "OSError: libtorch.so: file too short" in run.events(journal.JobEnded)[0].why
    assert run.nothing_is_left()


def test_an_error_in_the_coordinator_itself_ends_the_job_and_is_told(job: Jobs) -> None:
    """Logged by the event loop and forgotten, it would leave a job that waits for ever."""
    run = job(RANK, *COLD, ranks=1)
    (run.root / "site").mkdir()
    (run.root / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "if any(word.endswith('nvrx-srun') for word in sys.orig_argv):\n"
        "    from nvrx_slurm.coordinator.running_cycle import RunningCycle\n"
        "    RunningCycle.is_alive = lambda *_: 1 / 0\n"
    )
    run.environment_of_coordinator(PYTHONPATH=f"{run.root}/site:{run.stub_torch}")
    assert run.run() == 1
    (ended,) = run.events(journal.JobEnded)
    assert ended.why.startswith("an error in nvrx-srun itself: ZeroDivisionError")
    assert "Traceback" in run.stderr
    assert run.nothing_is_left()


def test_what_torch_prints_on_import_is_not_taken_for_a_port(job: Jobs) -> None:
    run = job(RANK + "write('port', os.environ['MASTER_PORT'])", *COLD, ranks=1)
    chatty = run.root / "chatty" / "torch"
    chatty.mkdir(parents=True)
    (chatty / "__init__.py").write_text("print('29500 is a nice port')")
    (chatty / "distributed.py").write_text((run.stub_torch / "torch" / "distributed.py").read_text())
    run.environment_of_coordinator(PYTHONPATH=str(chatty.parent))
    assert run.run() == 0
    assert run.wait_for_file("port") != "29500"


def test_a_missing_srun_fails_the_job(job: Jobs) -> None:
    run = job(WAITS, *COLD, ranks=1)
    tools = run.root / "tools"
    tools.mkdir()
    (tools / "scontrol").symlink_to(run.stand_ins / "scontrol")
    run.environment_of_coordinator(PATH=f"{tools}:/bin:/usr/bin")
    assert run.run() == 1
    assert run.events(journal.JobEnded)[0].why.startswith("no agent ever joined: srun")
    assert run.nothing_is_left()


def test_an_agent_that_cannot_take_part_says_why(job: Jobs) -> None:
    run = job(WAITS, *COLD, "--nproc-per-node", "gpu")
    assert run.run() == 2
    (ended,) = run.events(journal.JobEnded)
    assert ended.why == "n1: --nproc-per-node=gpu, but Slurm has given this job no GPU on this node"
    assert run.nothing_is_left()


def test_a_node_whose_agent_never_comes_is_replaced_by_a_spare(job: Jobs) -> None:
    run = job(RANK, *COLD, "--spares", "1", nodes=3, ranks=1, TEST_ABSENT_NODES="n2")
    assert run.run() == 0
    assert run.events(journal.CycleStarted)[0].nodes == ["n1", "n3"]


def test_a_private_directory_that_is_gone_costs_no_more_than_its_node(job: Jobs) -> None:
    script = (
        RANK
        + """
if cycle == 0:
    write(f"ready{rank}")
    wait_for("go_on")
    sys.exit(1)
"""
    )
    run = job(script, *COLD, "--spares", "1", "--max-restarts", "3", nodes=2, ranks=1).start()
    run.wait_for_file("ready0")
    on_n1 = run.private_dir_of("n1")
    for path in on_n1.iterdir():
        path.unlink()
    on_n1.rmdir()
    run.touch("go_on")
    assert run.wait() == 0
    assert len(run.events(journal.CycleStarted)) <= 3
    assert run.nothing_is_left()
