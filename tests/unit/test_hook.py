"""One run of a hook: what it does about what the checks find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from health_world import CHECKS

from nvrx_slurm.health.baseline import Baseline
from nvrx_slurm.health.config import HealthConfig, parse_config
from nvrx_slurm.health.node import JobContext
from nvrx_slurm.health.registry import Check, Need, Settings
from nvrx_slurm.health.result import CheckResult, fail, ok
from nvrx_slurm.health.stage import EVERY_STAGE, Stage
from nvrx_slurm.health.strikes import APART_S
from nvrx_slurm.health.take_baseline import remember_baseline
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.hooks import hook as hook_module
from nvrx_slurm.hooks.cleanup import Leftovers, LeftProcess
from nvrx_slurm.hooks.context import ContextError, HookContext
from nvrx_slurm.hooks.hook import ExitCode, Hook
from nvrx_slurm.slurm import SlurmRefusedError, SlurmUnavailableError
from nvrx_slurm.slurm.administration import JobOnNode
from nvrx_slurm.testing.health import FakeClock, FakeNvml, fake_node
from nvrx_slurm.testing.slurm import FakeNodeAdmin

JOB = JobContext(job_id="12", uid=1001)


class World:
    """One node, one check that says what a test tells it to, and what the hook has said."""

    def __init__(self, root: Path) -> None:
        self.admin = FakeNodeAdmin("n1", "n2")
        self.said: list[str] = []
        self.waited: list[float] = []
        self.when_waiting: Callable[[], object] = lambda: None
        self.fan: CheckResult = ok("turns")
        self.deep: CheckResult = ok("fast")
        self.accusation = ""
        self.strikes = 1
        self.config = HealthConfig()
        self.clock = FakeClock()
        self._root = root

    def run(self, stage: Stage) -> ExitCode:
        node = fake_node(self._root, stage=stage, clock=self.clock)
        job = dataclasses.replace(JOB, accused=bool(self.accusation))
        checks = {
            "fan": self._check("fan", lambda: self.fan),
            "gpu-probe": self._check("gpu-probe", lambda: self.deep, opt_in=True),
        }
        context = HookContext("n1", job, self.accusation)
        say = self.said.append
        return Hook(context, node, checks, self.config, self.admin, say, 30.0, self._wait).run()

    def _wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.when_waiting()

    def _check(self, name: str, say: Callable[[], CheckResult], *, opt_in: bool = False) -> Check:
        return Check(
            name=name,
            run=lambda node, settings: [say()],
            stages=EVERY_STAGE,
            needs=(Need.PROCFS,),
            settings=Settings,
            budget_s=10.0,
            strikes=self.strikes,
            lane=name,
            opt_in=opt_in,
        )

    def baseline(self) -> Baseline | None:
        return fake_node(self._root).baseline


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


BROKEN = fail("it is off", "/sys/fan", remedy="replace it")


def test_a_healthy_node_passes_and_slurm_is_not_asked(world: World) -> None:
    world.admin.unavailable = SlurmUnavailableError("nobody may ask")
    assert world.run(Stage.PROLOG) is ExitCode.PASS
    assert world.said == []


def test_a_prolog_that_finds_nothing_takes_the_baseline(world: World) -> None:
    world.run(Stage.EPILOG)
    assert world.baseline() is None
    world.run(Stage.PROLOG)
    assert world.baseline() is not None


def test_a_failing_prolog_drains_and_has_the_job_start_elsewhere(world: World) -> None:
    world.fan = BROKEN
    assert world.run(Stage.PROLOG) is ExitCode.NODE_FAILED
    assert world.admin.orders == [("drain", "n1"), ("start_elsewhere", "12")]
    assert world.baseline() is None
    assert world.said == [
        "FAIL fan: it is off [/sys/fan]; do: replace it",
        "node n1 drained: nvrx:fan:node:repair 1795982672 it is off",
        "job 12 is requeued, and starts elsewhere",
    ]


def test_a_failing_epilog_drains_and_leaves_the_job_alone(world: World) -> None:
    world.fan = BROKEN
    assert world.run(Stage.EPILOG) is ExitCode.NODE_FAILED
    assert world.admin.orders == [("drain", "n1")]


def test_a_failing_periodic_check_drains(world: World) -> None:
    world.fan = BROKEN
    assert world.run(Stage.PERIODIC) is ExitCode.NODE_FAILED
    assert world.admin.orders == [("drain", "n1")]


def test_a_job_that_cannot_be_requeued_is_left_to_slurm(world: World) -> None:
    world.fan = BROKEN

    def refuse(job_id: str) -> None:
        raise SlurmRefusedError("Only batch jobs are accepted or processed")

    world.admin.start_elsewhere = refuse  # type: ignore[method-assign]
    assert world.run(Stage.PROLOG) is ExitCode.NODE_FAILED
    assert "Only batch jobs are accepted" in world.said[-1]


def test_the_brake_lets_the_job_begin(world: World) -> None:
    world.fan = BROKEN
    world.admin.set("n2", "idle+drain", "nvrx:fan:node:repair 1 it is off")
    assert world.run(Stage.PROLOG) is ExitCode.PASS
    assert "NOT drained" in world.said[-1]
    assert world.admin.orders == []


def test_a_broken_node_that_somebody_is_draining_gets_no_job_either(world: World) -> None:
    world.fan = BROKEN
    world.admin.set("n1", "idle+drain", "swapping it")
    assert world.run(Stage.PROLOG) is ExitCode.NODE_FAILED
    assert world.admin.orders == [("start_elsewhere", "12")]
    assert world.admin.records["n1"].reason == "swapping it"


def test_a_slurm_that_does_not_answer_stops_no_job(world: World) -> None:
    world.fan = BROKEN
    world.admin.unavailable = SlurmUnavailableError("no answer")
    assert world.run(Stage.PROLOG) is ExitCode.PASS


def test_a_failure_that_does_not_count_yet_drains_nothing_and_keeps_the_old_baseline(world: World) -> None:
    """Else the next look would not see it again, and it would never count."""
    world.strikes = 2
    world.fan = BROKEN
    assert world.run(Stage.PROLOG) is ExitCode.PASS
    assert world.baseline() is None
    world.clock.advance(APART_S)
    assert world.run(Stage.PROLOG) is ExitCode.NODE_FAILED


def test_only_an_accused_node_is_looked_at_deeper(world: World) -> None:
    world.deep = fail("half as fast", "matmul", "gpu 2", remedy="replace it")
    assert world.run(Stage.EPILOG) is ExitCode.PASS
    world.accusation = "3 faults of its own"
    assert world.run(Stage.EPILOG) is ExitCode.NODE_FAILED
    assert world.admin.records["n1"].reason == "nvrx:gpu-probe:gpu-2:repair 1795982672 half as fast"


def test_an_accusation_alone_drains_nothing(world: World) -> None:
    world.accusation = "I do not like it"
    assert world.run(Stage.EPILOG) is ExitCode.PASS
    assert world.said == ["job 12 accuses this node: I do not like it"]
    assert world.admin.orders == []


def test_the_site_says_what_looking_deeper_is(world: World) -> None:
    world.config = parse_config("hooks: {deep_checks: []}", "x", CHECKS)
    world.deep = fail("half as fast", "matmul", remedy="replace it")
    world.accusation = "slow"
    assert world.run(Stage.EPILOG) is ExitCode.PASS


# --- cleaning up -------------------------------------------------------------------------------------------


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The user has left a process; the uids for which it was ended."""
    cleaned: list[int] = []

    def clean(leftovers: Leftovers, uid: int) -> str:
        cleaned.append(uid)
        return ""

    process = LeftProcess(77, 1, "python")
    monkeypatch.setattr(hook_module, "find_leftovers", lambda uid: Leftovers((process,)))
    monkeypatch.setattr(hook_module, "clean", clean)
    return cleaned


def test_an_epilog_cleans_up_after_its_user(world: World, left: list[int]) -> None:
    world.admin.jobs[(1001, "n1")] = [JobOnNode(12, completing=True)]
    world.run(Stage.EPILOG)
    assert left == [1001]
    assert world.said == ["user 1001 had left 1 processes: python (77): cleaned up"]


@pytest.mark.parametrize(
    "other",
    [JobOnNode(11, completing=False), JobOnNode(13, completing=False), JobOnNode(13, completing=True)],
)
def test_nothing_is_cleaned_up_where_the_user_has_another_job(
    world: World, left: list[int], other: JobOnNode
) -> None:
    world.admin.jobs[(1001, "n1")] = [JobOnNode(12, completing=True), other]
    world.run(Stage.EPILOG)
    assert (left, world.waited) == ([], [])


def test_of_jobs_that_end_together_the_last_one_cleans_up(world: World, left: list[int]) -> None:
    there = [JobOnNode(11, completing=True), JobOnNode(12, completing=True)]
    world.admin.jobs[(1001, "n1")] = there
    world.when_waiting = lambda: there.pop(0)
    world.run(Stage.EPILOG)
    assert (left, world.waited) == ([1001], [1.0])


def test_and_does_not_wait_for_ever(world: World, left: list[int]) -> None:
    world.admin.jobs[(1001, "n1")] = [JobOnNode(11, completing=True)]
    world.run(Stage.EPILOG)
    assert (left, world.waited) == ([], [1.0] * 5)


def test_nothing_is_cleaned_up_where_slurm_does_not_say_who_has_jobs(world: World, left: list[int]) -> None:
    world.admin.unavailable = SlurmUnavailableError("no answer")
    world.run(Stage.EPILOG)
    assert left == []
    assert "not cleaned up, Slurm could not be asked" in world.said[0]


def test_a_clean_up_that_breaks_keeps_no_node_from_being_looked_at(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(uid: int) -> Leftovers:
        raise ValueError("nobody has thought of that")

    monkeypatch.setattr(hook_module, "find_leftovers", find)
    world.fan = BROKEN
    assert world.run(Stage.EPILOG) is ExitCode.NODE_FAILED
    assert world.said[0] == "not cleaned up: ValueError: nobody has thought of that"


@pytest.mark.parametrize("stage", [Stage.PROLOG, Stage.PERIODIC])
def test_only_an_epilog_cleans_up(world: World, left: list[int], stage: Stage) -> None:
    world.run(stage)
    assert left == []


@pytest.mark.parametrize("hooks", ["{clean_up: off}", "{clean_up_from_uid: 1002}"])
def test_the_site_says_after_whom_to_clean_up(world: World, left: list[int], hooks: str) -> None:
    world.config = parse_config(f"hooks: {hooks}", "x", CHECKS)
    world.run(Stage.EPILOG)
    assert left == []


# --- what slurmd tells -------------------------------------------------------------------------------------


def context(notes: str = "", stage: Stage = Stage.EPILOG, **environ: str) -> HookContext:
    given = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "12", "SLURM_JOB_UID": "1001", **environ}
    return HookContext.from_environ(given, notes, stage)


ACCUSED = '{"nvrx":{"v":1,"run":1,"bad":{"n1":"slow"}}}'


def test_node_and_job_are_read() -> None:
    told = context()
    assert (told.node, told.job.job_id, told.job.uid, told.accusation) == ("n1", "12", 1001, "")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURMD_NODENAME": ""},
        {"SLURMD_NODENAME": "n1 State=RESUME"},
        {"SLURMD_NODENAME": "-n1"},
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": "12;reboot"},
    ],
)
def test_what_is_no_name_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ContextError, match="slurmd sets it"):
        context(**environ)


def test_health_check_program_is_told_no_job() -> None:
    assert HookContext.from_environ({"SLURMD_NODENAME": "n1"}, "", Stage.PERIODIC).job.job_id == ""


@pytest.mark.parametrize("notes", [ACCUSED + "\0", "\0" + ACCUSED, "other\0" + ACCUSED])
def test_an_accusation_is_read_from_comment_and_extra(notes: str) -> None:
    told = context(notes)
    assert (told.accusation, told.job.accused) == ("slow", True)


@pytest.mark.parametrize(
    ("count", "counts"), [("1", True), ("2", True), ("3", False), ("0", False), ("", True)]
)
def test_an_accusation_counts_in_the_epilog_of_its_own_run(count: str, counts: bool) -> None:
    """Slurm counts the next run before the epilog of the one that is being requeued."""
    assert bool(context(ACCUSED, SLURM_JOB_RESTART_COUNT=count).accusation) is counts


@pytest.mark.parametrize("stage", [Stage.PROLOG, Stage.PERIODIC])
def test_a_job_that_has_not_run_accuses_nobody(stage: Stage) -> None:
    told = context(ACCUSED, stage)
    assert (told.accusation, told.job.accused) == ("", False)


def test_an_accusation_of_another_node_is_none_of_this_one() -> None:
    assert context(ACCUSED, SLURMD_NODENAME="n2").accusation == ""


# --- the baseline ------------------------------------------------------------------------------------------


def test_a_driver_that_does_not_answer_for_a_moment_does_not_make_gpus_unexpected(tmp_path: Path) -> None:
    assert remember_baseline(fake_node(tmp_path, FakeNvml(8))) == ""
    mute = fake_node(tmp_path, UnavailableError("the driver does not answer", "nvmlInit"))
    assert remember_baseline(mute) == "GPUs cannot be read, and could when the last one was taken"
    baseline = fake_node(tmp_path).baseline
    assert baseline is not None
    assert len(baseline.gpus or ()) == 8


def test_a_node_that_never_had_gpus_has_a_baseline_without(tmp_path: Path) -> None:
    for _ in range(2):
        assert remember_baseline(fake_node(tmp_path)) == ""
