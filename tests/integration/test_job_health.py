"""A node whose own checks fail leaves the job: real agents, a site script that fails on one node."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import RANK, LocalJob, until

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind

Jobs = Callable[..., LocalJob]
PATIENT_S = 200.0
"""Three agents and what looks at their nodes all start at once."""
QUICK_STOP = ("--workers-stop-timeout", "300ms")
ALL_END = RANK + "\nwrite(f'ran{rank}.{cycle}')\n"


@pytest.fixture
def job(job: Jobs, tmp_path: Path) -> Jobs:
    """Jobs whose nodes run one site script: node N is broken while the file ``broken.N`` is there."""
    scripts = tmp_path / "checks.d"
    scripts.mkdir(mode=0o755)
    script = scripts / "fan"
    script.write_text(f'#!/bin/sh\ncat "{tmp_path}/broken.$SLURMD_NODENAME" 2>/dev/null && exit 2\nexit 0\n')
    script.chmod(0o755)
    config = tmp_path / "health.yaml"
    config.write_text(
        "job_interval_s: 0.3\n"
        "budget_s: 60\n"
        f"checks:\n  site-scripts: {{directory: {scripts}, timeout_s: 50, answer_s: 45}}\n"
        f"  devices: {{required: [{tmp_path}/device]}}\n"
    )
    config.chmod(0o600)
    os.mknod(tmp_path / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))

    def make(*arguments: Any, **keywords: Any) -> LocalJob:
        run = job(*arguments, SLURM_JOB_ID=str(os.getpid()), **keywords)
        run.set_in_agents("nvrx_slurm.agent.health_watch", FIRST_VERDICT_S=PATIENT_S)
        return run

    return make


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    return (*QUICK_STOP, "--health", "on", "--health-config", str(tmp_path / "health.yaml"))


if os.geteuid() != 0:
    pytest.skip("needs root to make a device node", allow_module_level=True)


def break_node(tmp_path: Path, node: str) -> None:
    (tmp_path / f"broken.{node}.new").write_text("the fan is off\n")
    (tmp_path / f"broken.{node}.new").rename(tmp_path / f"broken.{node}")


def verdicts(run: LocalJob, node: str) -> list[str]:
    return [event.status for event in run.events(journal.HealthChecked) if event.node == node]


def test_a_node_that_is_broken_at_the_start_never_gets_ranks(
    job: Jobs, options: tuple[str, ...], tmp_path: Path
) -> None:
    break_node(tmp_path, "n2")
    run = job(ALL_END, *options, "--spares", "1", nodes=3)
    assert run.run(PATIENT_S) == 0, run.stderr
    (started,) = run.events(journal.CycleStarted)
    assert started.nodes == ["n1", "n3"]
    (checked,) = [event for event in run.events(journal.HealthChecked) if event.node == "n2"]
    assert checked.status == "fail"
    assert checked.findings[0] == journal.HealthFinding(
        check="site-scripts",
        scope="script fan",
        failed=True,
        evidence="the fan is off",
        remedy="what the script's author says",
    )
    (excluded,) = run.events(journal.NodeExcluded)
    assert (excluded.node, excluded.reason) == ("n2", "site-scripts script fan: the fan is off")
    assert "node n2: site-scripts script fan: the fan is off" in run.stderr
    assert "node n2 is excluded: site-scripts script fan: the fan is off" in run.stderr
    assert run.nothing_is_left()


def test_without_a_spare_the_job_starts_again_without_the_node(
    job: Jobs, options: tuple[str, ...], tmp_path: Path
) -> None:
    break_node(tmp_path, "n2")
    run = job(ALL_END, *options, nodes=2)
    assert run.run(PATIENT_S) == 75
    assert run.events(journal.CycleStarted) == []
    (requeued,) = run.events(journal.Requeued)
    assert requeued.excluded == ["n2"]
    assert run.nothing_is_left()


def test_a_node_that_breaks_during_training_leaves_at_the_next_restart(
    job: Jobs, options: tuple[str, ...], tmp_path: Path
) -> None:
    run = job(
        RANK
        + """
if cycle == 0 and rank == 0:
    wait_for("fail")
    sys.exit(1)
elif cycle == 0:
    time.sleep(60)
""",
        *(*options, "--spares", "1"),
        nodes=3,
    ).start()
    run.rank(3)
    break_node(tmp_path, "n2")
    until("n2 says so", lambda: "fail" in verdicts(run, "n2"), PATIENT_S)
    assert len(run.events(journal.CycleStarted)) == 1, "training goes on"
    run.touch("fail")
    assert run.wait(PATIENT_S) == 0, run.stderr
    assert [started.nodes for started in run.events(journal.CycleStarted)] == [["n1", "n2"], ["n1", "n3"]]
    assert run.nothing_is_left()


def test_what_has_just_broken_a_node_is_seen_right_after_the_restart(
    job: Jobs, options: tuple[str, ...], tmp_path: Path
) -> None:
    """The restart has the node looked at and does not wait; the cycle that it starts is stopped again."""
    config = tmp_path / "health.yaml"
    config.write_text(config.read_text().replace("job_interval_s: 0.3", "job_interval_s: 600"))
    run = job(
        RANK
        + f"""
if cycle == 0 and rank == 2:
    wait_for("fail")
    os.rename("{tmp_path}/breaks.n2", "{tmp_path}/broken.n2")
    sys.exit(1)
elif cycle == 0 or os.environ["SLURMD_NODENAME"] == "n2":
    time.sleep(60)
""",
        *(*options, "--spares", "1"),
        nodes=3,
    )
    (tmp_path / "breaks.n2").write_text("the fan is off\n")
    run.start().rank(3)
    run.touch("fail")
    assert run.wait(PATIENT_S) == 0, run.stderr
    assert verdicts(run, "n2") == ["ok", "fail"]
    assert run.events(journal.CycleStarted)[-1].nodes == ["n1", "n3"]
    assert [verdict.node for verdict in run.events(journal.Verdict)][-1] == "n2"


def test_a_node_that_no_rank_can_use_any_more_stops_the_cycle(
    job: Jobs, options: tuple[str, ...], tmp_path: Path
) -> None:
    """The device is gone on both nodes of this one machine. If the other says so within a second, it is not
    held against the first; on a machine that is too busy for that, the first is left out.
    """
    run = job(RANK + "\nif cycle == 0:\n    time.sleep(60)\n", *options, nodes=2).start()
    run.rank(3)
    (tmp_path / "device").unlink()
    believed = run.wait(PATIENT_S) == 75
    assert len(run.events(journal.NodeExcluded)) == believed, run.stderr
    assert len(run.events(journal.HealthDisbelieved)) == (not believed), run.stderr
    fault = run.events(journal.FaultDetected)[0]
    assert (fault.kind, fault.detector) == (FaultKind.UNHEALTHY, "health")
    assert fault.detail.endswith("is not there")
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.rule, verdict.kind) == ("unhealthy-node", FaultKind.UNHEALTHY)
    assert "is unhealthy (devices device" in run.stderr


def test_what_fails_on_every_node_is_not_held_against_them(
    job: Jobs, options: tuple[str, ...], tmp_path: Path
) -> None:
    for node in ("n1", "n2", "n3"):
        break_node(tmp_path, node)
    run = job(ALL_END, *options, "--spares", "1", nodes=3)
    assert run.run(PATIENT_S) == 0, run.stderr
    assert run.events(journal.NodeExcluded) == []
    assert run.events(journal.HealthDisbelieved) == [journal.HealthDisbelieved(check="site-scripts", nodes=3)]
    assert "check site-scripts fails on most of 3 nodes: not held against them" in run.stderr


def test_with_health_off_nothing_is_looked_at(job: Jobs, options: tuple[str, ...], tmp_path: Path) -> None:
    break_node(tmp_path, "n2")
    run = job(ALL_END, *options, "--health", "off", nodes=2)
    assert run.run(PATIENT_S) == 0, run.stderr
    assert run.events(journal.HealthChecked) == []


def test_a_killed_helper_is_no_fault(job: Jobs, options: tuple[str, ...]) -> None:
    run = job(RANK + "\nwait_for('end')\n", *options, nodes=1).start()
    run.rank(1)
    first = run.named("nvrx-health")
    first.kill()
    until("a new helper", lambda: run._named("nvrx-health", "n1") not in (None, first), PATIENT_S)
    run.touch("end")
    assert run.wait(PATIENT_S) == 0, run.stderr
    assert run.events(journal.FaultDetected) == []
    assert run.nothing_is_left()


def test_a_configuration_that_is_wrong_is_refused_before_anything_starts(job: Jobs, tmp_path: Path) -> None:
    (tmp_path / "health.yaml").write_text("checks: {gpu-cuont: off}")
    run = job(ALL_END, "--health", "on", "--health-config", str(tmp_path / "health.yaml"), nodes=1)
    assert run.run(PATIENT_S) == 2
    assert "did you mean gpu-count?" in run.stderr
