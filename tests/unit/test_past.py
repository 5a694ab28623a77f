"""What the journal of earlier attempts tells a new one."""

from __future__ import annotations

from pathlib import Path

import msgspec
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.past import Past, past_of_job, read_past
from nvrx_slurm.coordinator.progress import Progress
from nvrx_slurm.journal import FaultKind, JournalWriter, Record, VerdictAction
from nvrx_slurm.journal.events import AnyEvent

ARGV = ["train.py", "--fast"]


class Told:
    """A journal that is written attempt by attempt, a minute from one event to the next."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.cycle = -1
        self.ts = 1e9

    def say(self, *events: AnyEvent, attempt: int = 0, job: str = "7", after_s: float = 60.0) -> Told:
        for event in events:
            self.cycle += isinstance(event, journal.CycleStarted)
            self.ts += after_s
            self.records.append(
                Record(ts=self.ts, job=job, attempt=attempt, cycle=max(self.cycle, 0), event=event)
            )
        return self

    def attempt(
        self,
        number: int,
        *events: AnyEvent,
        code: int | None = 75,
        argv: list[str] = ARGV,
        after_s: float = 60.0,
    ) -> Told:
        begun = journal.JobStarted(
            nodes=["n1"], active_nodes=1, spares=0, max_restarts=3, argv=argv, host="n1", fence="", version=""
        )
        cycle = journal.CycleStarted(world_size=2, nodes=["n1"], spares=[])
        ended = [] if code is None else [journal.JobEnded(code=code, why="")]
        return self.say(begun, cycle, *events, *ended, attempt=number, after_s=after_s)

    def past(self, attempt: int = 1, argv: list[str] = ARGV) -> Past:
        return read_past(self.records, "7", attempt, argv)


STEP = journal.Progress(step=40)
STUCK = journal.CycleScored(progressed=False, in_a_row=2, step=40)


def test_a_job_that_begins_has_no_past(tmp_path: Path) -> None:
    assert past_of_job(tmp_path / "journal.jsonl", "7", 0, ARGV) == Past()


def test_the_count_and_the_highest_steps_go_on() -> None:
    past = Told().attempt(0, journal.RankReady(ranks=2), STEP, STUCK).past()
    assert past.progress == Progress(step=40, in_a_row=2, monitored=True)


def test_a_cycle_that_nobody_scored_ends_the_count_if_it_came_further() -> None:
    """It was asked to stop, or the Coordinator was lost."""
    for code in (75, None):
        past = (
            Told().attempt(0, STEP, STUCK, journal.CycleStarted(world_size=2, nodes=["n1"], spares=[])).past()
        )
        assert past.progress.in_a_row == 2
        further = Told().attempt(0, STEP, STUCK, code=code)
        further.attempt(1, journal.Progress(step=41), code=code)
        assert further.past(2).progress == Progress(step=41, in_a_row=0, monitored=True)


def test_checkpoints_and_how_the_last_cycle_ended_are_known_too() -> None:
    scored = journal.CycleScored(progressed=False, in_a_row=1, step=30, checkpoints=True, early_end="exit 1")
    saved = journal.CheckpointSaved(step=30, layer="shared", rank=0)
    past = Told().attempt(0, saved, STEP, scored).past()
    assert past.progress == Progress(step=40, saved=30, in_a_row=1, monitored=True, early_end="exit 1")


def test_faults_of_a_nodes_own_are_counted_by_the_verdicts() -> None:
    def blamed(node: str, kind: FaultKind, signal: str | None = None) -> list[AnyEvent]:
        seen = journal.FaultDetected(kind=kind, node=node, detector="child", rank=1, signal=signal)
        verdict = journal.Verdict(
            action=VerdictAction.RESTART, rule="r", why="", node=node, rank=1, kind=kind
        )
        return [journal.CycleStarted(world_size=2, nodes=["n1"], spares=[]), seen, verdict]

    told = Told().attempt(
        0,
        *blamed("n1", FaultKind.SIGNAL, "SIGKILL"),
        *blamed("n1", FaultKind.HANG),
        *blamed("n2", FaultKind.EXIT),
        *blamed("n2", FaultKind.SIGNAL, "SIGABRT"),
    )
    assert told.past().faults == {"n1": 2}


def test_attempts_that_never_came_to_a_step_are_counted_until_one_does() -> None:
    told = Told().attempt(0).attempt(1)
    assert told.past(2).fruitless == 2
    assert told.attempt(2, STEP).past(3).fruitless == 0
    assert told.attempt(3, after_s=400).past(4).fruitless == 1  # its ranks have a client, and were silent


def test_without_a_client_a_long_run_is_taken_for_training() -> None:
    assert Told().attempt(0, after_s=301).past().fruitless == 0


def test_a_preempted_attempt_is_neither_fruitless_nor_proof_of_the_contrary() -> None:
    preempted = journal.StopRequested(signal="", why="a preemption by Slurm", preempted=True)
    assert Told().attempt(0).attempt(1, preempted).past(2).fruitless == 1


def test_another_program_in_the_same_job_has_no_past() -> None:
    assert Told().attempt(0, STEP, STUCK).past(1, ["eval.py"]) == Past()


def test_a_program_that_came_to_its_end_has_left_nothing() -> None:
    for code in (0, 1, 93):
        assert Told().attempt(0, STEP, STUCK, code=code).past(0) == Past()


def test_another_jobs_records_in_a_shared_run_directory_are_no_past() -> None:
    told = Told().attempt(0, STEP, STUCK)
    assert read_past(told.records, "8", 1, ARGV) == Past()


def test_the_machines_own_journal_is_read_as_the_machine_meant_it(tmp_path: Path) -> None:
    # given a job that the machine has run to exit code 75
    job = Job.running(max_restarts=50).trains(5).fails().trains(5).fails(2, -9).lose("n2").stopped("n1")
    assert job.end.code == 75
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path, "7", 0)
    writer.append(0, Told().attempt(0).records[0].event)
    for write in job.all(steps.Write):
        assert isinstance(write, steps.Write)
        writer.append(write.cycle, write.event)
        if isinstance(write.event, journal.CycleStarted):
            writer.append(write.cycle, journal.Progress(step=5))
    writer.close()
    # when the next attempt reads its journal
    past = past_of_job(path, "7", 1, ARGV)
    # then it knows what the machine knew
    assert past.progress == job.machine.budget.progress
    assert past.faults == {"n2": 2}
    assert past.fruitless == 0


def test_a_hang_is_held_against_the_node_of_the_rank_that_traces_show() -> None:
    hang = journal.FaultDetected(kind=FaultKind.HANG, node="n1", rank=0, detector="heartbeat")
    verdict = journal.Verdict(
        action=VerdictAction.RESTART, rule="hang", why="", node="n1", rank=0, kind=FaultKind.HANG
    )
    rank = journal.Implicated(kind="rank", id="3", rank=3, node="n2", confidence=0.6, by_traces=True)
    shown = journal.CycleAttributed(culprits=[rank])
    assert Told().attempt(0, hang, verdict).past().faults == {"n1": 1}
    told = Told().attempt(0, hang, verdict, shown, shown)
    assert {node: faults for node, faults in told.past().faults.items() if faults} == {"n2": 1}
    printed = msgspec.structs.replace(shown, culprits=[msgspec.structs.replace(rank, by_traces=False)])
    assert Told().attempt(0, hang, verdict, printed).past().faults == {"n1": 1}
