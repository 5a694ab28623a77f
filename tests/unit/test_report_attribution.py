"""What a report says of a cycle that has been attributed."""

from __future__ import annotations

from report_journals import START, Writer, hung, killed

from nvrx_slurm.journal import CycleAttributed, Implicated, JobEnded, Record
from nvrx_slurm.report import build_report, document
from nvrx_slurm.report.model import JobReport, MomentKind

RANK_3 = Implicated(
    kind="rank", id="3", rank=3, node="n2", confidence=0.6, why="host-lag: all_reduce 5", by_traces=True
)
SHOWN = CycleAttributed(
    category="job.hang",
    says="a rank gave no sign of life within its time-out",
    action="restart",
    rule="11-restart",
    why="it may have been the node",
    confidence=0.6,
    culprits=[RANK_3],
    file="cycles/0/attribution.json",
)


def journal_of(*found: CycleAttributed, ended: bool = False) -> list[Record]:
    job = Writer()
    job.job_started(0.0, nodes=2, spares=0)
    job.cycle_starts(1.0, ["n1", "n2"])
    job.trains(2.0, 3.0, None, ranks=4)
    job.at(9.0, hung(0, "n1"))
    if ended:
        job.at(9.5, JobEnded(code=1, why="used up"))
    else:
        job.restart(9.5, "hang", "rank 0 hung", hung(0, "n1"))
        job.cycle_starts(9.6, ["n1", "n2"])
        job.cycle = 0
    job.at(12.0, *found)
    return job.records


def report_of(*found: CycleAttributed, ended: bool = False) -> JobReport:
    return build_report(journal_of(*found, ended=ended), START + 13.0)


def test_a_hang_was_caused_by_the_rank_that_traces_show() -> None:
    cause = report_of(SHOWN).cycles[0].cause
    assert cause is not None
    assert (cause.rank, cause.node, cause.detector) == (3, "n2", "traces")
    before = report_of().cycles[0].cause
    assert before is not None
    assert (before.rank, before.detector) == (0, "heartbeat")


def test_the_rank_whose_heartbeat_was_oldest_is_among_those_that_waited() -> None:
    assert [fault.rank for fault in report_of(SHOWN).cycles[0].cascade] == [0]


def test_traces_change_nothing_of_another_fault() -> None:
    job = Writer()
    job.job_started(0.0, nodes=2, spares=0)
    job.cycle_starts(1.0, ["n1", "n2"])
    job.at(9.0, killed(0, "n1"))
    job.restart(9.5, "killed-by-signal", "rank 0 was killed", killed(0, "n1"))
    job.cycle = 0
    job.at(12.0, SHOWN)
    cause = build_report(job.records, START + 13.0).cycles[0].cause
    assert cause is not None
    assert cause.rank == 0


def test_what_is_found_out_after_the_end_belongs_to_its_cycle() -> None:
    report = report_of(SHOWN, ended=True)
    assert report.read.fenced == 0
    assert report.cycles[0].attributed is not None
    assert report.until == START + 9.5


def test_the_timeline_and_the_first_lines_tell_cause_culprit_and_what_would_follow() -> None:
    report = report_of(SHOWN)
    (moment,) = [moment for moment in report.timeline if moment.kind is MomentKind.ATTRIBUTED]
    who = "a rank gave no sign of life within its time-out, rank 3 on n2 (60% sure)"
    assert moment.text == f"of cycle 0: {who}; next: restart, it may have been the node [11-restart]"
    assert f"cause: {who}" in document(report)["headline"][1]


def test_the_document_holds_it_and_null_where_there_is_none() -> None:
    first, second = document(report_of(SHOWN))["cycles"]
    assert second["attribution"] is None
    assert first["attribution"]["category"] == "job.hang"
    assert first["attribution"]["culprits"][0]["rank"] == 3
    assert first["attribution"]["file"] == "cycles/0/attribution.json"


def test_a_failure_to_find_out_is_told_and_changes_nothing() -> None:
    report = report_of(CycleAttributed(failed="it took longer than 120 s"))
    assert report.cycles[0].attributed is None
    assert any(moment.text.endswith("it took longer than 120 s") for moment in report.timeline)


def test_of_a_service_the_timeline_tells_and_the_cause_is_ours() -> None:
    service = CycleAttributed(by="service", action="stop", rule="service", why="it says so")
    report = report_of(SHOWN, service)
    assert report.cycles[0].attributed is not None
    assert report.cycles[0].attributed.category == "job.hang"
    assert any("by service" in moment.text for moment in report.timeline)
