"""What a requeue would exclude, and how the job stands when Slurm does not play along."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from nvrx_slurm.slurm import (
    CannotRequeueError,
    Job,
    Node,
    SlurmConfig,
    SlurmRefusedError,
    SlurmUnavailableError,
    plan_requeue,
    requeue,
)
from nvrx_slurm.slurm.hostlist import expand_hostlist

CONFIG = SlurmConfig(kill_wait_s=30, slurmd_timeout_s=300)
JOB = Job(
    job_id="7",
    state="RUNNING",
    nodes=("n1", "n2", "n3"),
    batch_host="n1",
    work_dir=None,
    batch=True,
    requeue=True,
    restarts=0,
    partition="batch",
    num_nodes=3,
    required_nodes=(),
    excluded_nodes=("n9",),
)


def _partition(*names: str, down: tuple[str, ...] = ()) -> list[Node]:
    return [Node(name, "down" if name in down else "idle", "") for name in names]


FIVE = _partition("n1", "n2", "n3", "n4", "n5", down=("n2",))


def test_the_new_exclusions_come_on_top_of_the_old_ones() -> None:
    assert plan_requeue(JOB, ["n2"], FIVE, CONFIG).exclude == ("n9", "n2")


def test_a_node_that_is_excluded_already_is_not_excluded_twice() -> None:
    assert plan_requeue(JOB, ["n9", "n2", "n2"], FIVE, CONFIG).exclude == ("n9", "n2")


def test_a_node_that_the_job_requires_is_not_excluded_and_the_plan_says_so() -> None:
    plan = plan_requeue(replace(JOB, required_nodes=("n2",)), ["n2", "n3"], FIVE, CONFIG)
    assert plan.exclude == ("n9", "n3")
    assert "not excluding n2" in plan.warnings[0]


def test_nothing_is_excluded_that_would_leave_too_few_nodes() -> None:
    plan = plan_requeue(JOB, ["n2"], _partition("n1", "n2", "n3", down=("n2",)), CONFIG)
    assert plan.exclude == ("n9",)
    assert "needs 3 nodes" in plan.warnings[0]
    assert "only 2" in plan.warnings[0]


@pytest.mark.parametrize("state", ["down*", "drained", "draining", "fail", "maint", "idle*", "unknown"])
def test_nodes_that_slurm_would_not_use_do_not_count(state: str) -> None:
    partition = [*_partition("n1", "n3"), Node("n4", state, ""), Node("n2", "down", "")]
    assert plan_requeue(JOB, ["n2"], partition, CONFIG).exclude == ("n9",)


def test_the_job_may_start_only_after_its_completion() -> None:
    # Slurm knows that the node is down: completion takes KillWait.
    assert plan_requeue(JOB, ["n2"], FIVE, CONFIG).start_in_s == 35
    # It does not know yet: completion waits until it gives the node up.
    alive = _partition("n1", "n2", "n3", "n4", "n5")
    assert plan_requeue(JOB, ["n2"], alive, CONFIG).start_in_s == 635


@pytest.mark.parametrize(
    ("job", "why"),
    [(replace(JOB, batch=False), "interactive"), (replace(JOB, requeue=False), "--no-requeue")],
)
def test_jobs_that_cannot_be_requeued_are_refused(job: Job, why: str) -> None:
    with pytest.raises(CannotRequeueError, match=why):
        plan_requeue(job, ["n2"], FIVE, CONFIG)


def test_a_job_on_hold_is_requeued_and_not_released() -> None:
    slurm = _Slurm()
    plan = requeue(slurm, "7", ["n2"], hold=True)
    assert plan.held
    assert slurm.orders == ["hold", "ExcNodeList", "StartTime"]
    assert slurm.job_now.excluded_nodes == ("n9", "n2")
    assert not requeue(_Slurm(), "7", ["n2"]).held


class _Slurm:
    """Keeps one job; ``fails`` names the order that fails, and how."""

    def __init__(self, fails: dict[str, Exception] | None = None, *, ignores_exclusion: bool = False) -> None:
        self.job_now = JOB
        self.orders: list[str] = []
        self._fails = fails or {}
        self._ignores_exclusion = ignores_exclusion

    def _order(self, name: str) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "the requeue would kill its own commands"
        self.orders.append(name)
        if name in self._fails:
            raise self._fails[name]

    def job(self, job_id: str) -> Job:
        return self.job_now

    def node_address(self, node: str) -> str:
        return node

    def partition_nodes(self, partition: str) -> list[Node]:
        return FIVE

    def config(self) -> SlurmConfig:
        return CONFIG

    def requeue(self, job_id: str) -> None:
        self._order("requeue")

    def requeue_hold(self, job_id: str) -> None:
        self._order("hold")

    def update_job(self, job_id: str, **fields: str) -> None:
        self._order(",".join(fields))
        if "ExcNodeList" in fields and not self._ignores_exclusion:
            self.job_now = replace(self.job_now, excluded_nodes=tuple(expand_hostlist(fields["ExcNodeList"])))

    def release(self, job_id: str) -> None:
        self._order("release")


def test_a_requeue_holds_excludes_dates_and_releases_in_this_order() -> None:
    slurm = _Slurm()
    before = signal.getsignal(signal.SIGTERM)
    assert requeue(slurm, "7", ["n2"]).exclude == ("n9", "n2")
    assert slurm.orders == ["hold", "ExcNodeList", "StartTime", "release"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_refused_hold_leaves_the_job_as_it_is() -> None:
    slurm = _Slurm({"hold": SlurmRefusedError("Access denied")})
    with pytest.raises(CannotRequeueError, match="does not requeue job 7: Access denied"):
        requeue(slurm, "7", ["n2"])
    assert slurm.orders == ["hold"]


@pytest.mark.parametrize("order", ["ExcNodeList", "StartTime", "release"])
@pytest.mark.parametrize("error", [SlurmRefusedError("no"), SlurmUnavailableError("timed out")])
def test_a_step_that_fails_after_the_hold_says_how_to_release_the_job(order: str, error: Exception) -> None:
    with pytest.raises(CannotRequeueError, match=r"requeued but held.*scontrol release 7"):
        requeue(_Slurm({order: error}), "7", ["n2"])


def test_an_exclusion_that_slurm_did_not_take_is_noticed() -> None:
    with pytest.raises(CannotRequeueError, match="it still excludes n9"):
        requeue(_Slurm(ignores_exclusion=True), "7", ["n2"])


def test_the_number_of_nodes_is_changed_if_that_is_asked_for() -> None:
    slurm = _Slurm()
    requeue(slurm, "7", ["n2"], num_nodes=1)
    assert slurm.orders == ["hold", "ExcNodeList", "NumNodes", "StartTime", "release"]


def test_a_job_that_slurm_does_not_let_be_changed_is_requeued_as_it_is() -> None:
    """As without slurmdbd, once Slurm has taken a lost node out of it; a hold could not be released."""
    slurm = _Slurm({"Requeue": SlurmRefusedError("the DB index is being set")})
    slurm.job_now = replace(JOB, nodes=("n1", "n3"))
    plan = requeue(slurm, "7", ["n2"])
    assert slurm.orders == ["Requeue", "requeue"]
    assert plan.exclude == ("n9",)
    assert plan.start_in_s == 121
    assert "n2 is kept out only as long as Slurm holds it for down" in plan.warnings[-1]


def test_a_job_that_has_lost_a_node_but_can_be_changed_is_requeued_without_it() -> None:
    slurm = _Slurm()
    slurm.job_now = replace(JOB, nodes=("n1", "n3"))
    assert requeue(slurm, "7", ["n2"]).exclude == ("n9", "n2")
    assert slurm.orders == ["Requeue", "hold", "ExcNodeList", "StartTime", "release"]


@pytest.mark.parametrize(("launches", "limit", "warned"), [(4, 5, False), (5, 5, True), (5, None, False)])
def test_the_last_launch_that_the_owner_can_do_without_an_administrator_is_warned_of(
    launches: int, limit: int | None, warned: bool
) -> None:
    config = replace(CONFIG, max_batch_requeue=limit)
    plan = plan_requeue(replace(JOB, launches=launches), ["n2"], FIVE, config)
    assert any("only an administrator can release it" in warning for warning in plan.warnings) is warned
