"""The report as a person reads it: at 80 columns, without colour, in a pipe.

``NVRX_UPDATE_GOLDEN=1`` writes the golden files anew; read the difference before you keep it.
"""

from __future__ import annotations

import io
import os
from datetime import timezone
from pathlib import Path

import pytest
from report_journals import (
    START,
    Writer,
    drained,
    exited,
    gone,
    hung,
    killed,
    not_requeued,
    requeued,
    stacks_of,
    three_faults,
)
from rich.console import Console

from nvrx_slurm.journal import (
    FaultDetected,
    FaultKind,
    JobEnded,
    NotRequeued,
    Record,
    StopRequested,
    WorkersStopped,
)
from nvrx_slurm.report import JobReport, ReadState, build_report, render
from nvrx_slurm.report.headline import closing, headline
from nvrx_slurm.report.views import frame

DATA = Path(__file__).parent / "data"
DOCS = Path(__file__).parents[2] / "docs"
NODES = ["n1", "n2", "n3", "n4"]


def text_of(report: JobReport, width: int = 80, lines: int | None = 40) -> str:
    console = Console(width=width, no_color=True, highlight=False, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(report, zone=timezone.utc, lines=lines))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def until(records: list[Record], event: str, nth: int = 0) -> list[Record]:
    """Return the records up to the nth ``event``."""
    found = [index for index, record in enumerate(records) if type(record.event).__name__ == event]
    return records[: found[nth] + 1]


def unfinished(**state: int | bool) -> JobReport:
    return build_report(
        until(three_faults(), "Verdict", 1), START + 250.0, read=ReadState(torn=1, unfinished=True, unknown=2)
    )


CASES = {
    "three_faults": lambda: build_report(three_faults(), START + 1000.0),
    "requeued": lambda: build_report(requeued(), START + 1000.0),
    "waiting": lambda: build_report(until(requeued(), "Requeued"), START + 50.0),
    "not_requeued": lambda: build_report(not_requeued(), START + 1000.0),
    "drained": lambda: build_report(drained(), START + 1000.0),
    "recovering": lambda: build_report(until(three_faults(), "RankReady", 1), START + 25.7),
    "no_end": unfinished,
    "only_started": lambda: build_report(three_faults()[:1], START + 3.0),
    "empty": lambda: build_report([], START),
}


@pytest.mark.parametrize("name", CASES)
def test_a_report_looks_like_its_golden_file(name: str) -> None:
    golden = DATA / f"report_{name}.txt"
    shown = text_of(CASES[name]())
    if os.environ.get("NVRX_UPDATE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text()
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_the_example_of_the_documentation_is_the_golden_file() -> None:
    page = (DOCS / "report.md").read_text()
    assert f"```text\n{(DATA / 'report_three_faults.txt').read_text()}```" in page


# --- the first three lines -----------------------------------------------------------------------------


def trained(max_restarts: int = 5) -> Writer:
    w = Writer()
    w.job_started(0.0, max_restarts=max_restarts)
    w.cycle_starts(2.0, NODES, ["n5"])
    w.trains(4.0, 5.0, None)
    w.steps(5.0, 1, 10, 1.0)
    return w


def test_a_job_that_trains_says_so_first() -> None:
    assert headline(build_report(trained().records, START + 16.0)) == (
        "job 4711 is running (training, cycle 0); last event 2.0 s ago",
        "failed last: nothing",
        "now: trains (step 10); 0 of 5 restarts used, 1 spare node left",
    )


def test_a_job_that_recovers_says_what_it_waits_for() -> None:
    records = three_faults()
    shown = [
        headline(build_report(until(records, *where), START + now))[2]
        for where, now in (
            (("JobStarted",), 2.0),
            (("CycleStarted",), 3.0),
            (("RankReady",), 5.2),
            (("FaultDetected",), 24.4),
            (("Verdict",), 24.7),
            (("CycleStarted", 1), 24.8),
        )
    ]
    assert shown == [
        "now: starting for 2.0 s: waiting for the nodes to join",
        "now: starting for 3.0 s: cycle 0 has its nodes, ranks are starting",
        "now: starting for 5.2 s: all ranks of cycle 0 are ready, waiting for the first step",
        "now: recovering for 0.10 s: stopping what is left of cycle 0",
        "now: recovering for 0.70 s: workers are stopped, forming the next cycle",
        "now: recovering for 0.80 s: cycle 1 has its nodes, ranks are starting",
    ]


def test_a_job_that_does_lost_steps_again_says_so() -> None:
    records = until(three_faults(), "FirstStep", 1)
    assert headline(build_report(records, START + 26.3))[2].startswith("now: trains (step 31)")


def test_a_failed_job_names_the_log_to_read() -> None:
    w = trained()
    w.at(15.0, killed(3, "n2"))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.records.pop()
    w.at(15.3, JobEnded(code=1, why="restart budget of 0 used up"))
    state, failed, now = headline(build_report(w.records, START + 100.0))
    assert state == "job 4711 FAILED: code 1, restart budget of 0 used up"
    assert failed == "failed last: rank 3 on n2: SIGKILL (cycle 0, at +0:15); did not train again"
    assert now == "now: nothing restarts it; read cycles/0/rank_3.log in the run directory"


def test_a_lost_node_has_no_rank_log_to_read() -> None:
    w = trained()
    w.at(15.0, gone("n2"))
    w.at(15.3, JobEnded(code=1, why="w"))
    assert headline(build_report(w.records, START))[2].endswith(
        "read cycles/0/merged.log in the run directory"
    )


def test_a_stopped_job_says_who_asked() -> None:
    w = trained()
    w.at(15.0, StopRequested(signal="SIGTERM"))
    assert headline(build_report(w.records, START + 15.1))[2] == "now: stopping, asked to by SIGTERM"
    w.at(15.3, JobEnded(code=143, why="asked to stop by SIGTERM"))
    state, _, now = headline(build_report(w.records, START + 15.1))
    assert state == "job 4711 was stopped: code 143, asked to stop by SIGTERM"
    assert now == "now: nothing restarts it, it was asked to stop"


@pytest.mark.parametrize(
    ("in_slurm", "now"),
    [
        (None, "now: it trains in silence or lost its Coordinator: squeue -j 4711 tells if it runs"),
        (False, "now: Slurm no longer has the job: it was cut off, submit it again"),
    ],
)
def test_a_silent_job_is_not_called_running(in_slurm: bool | None, now: str) -> None:
    shown = headline(build_report(trained().records, START + 214.0, in_slurm=in_slurm))
    assert shown[0] == "job 4711 has no end recorded; last event 3m20s ago"
    assert shown[2] == now


@pytest.mark.parametrize(
    ("in_slurm", "now"),
    [
        (None, "now: waits for Slurm to start it again, if it was requeued (squeue -j 4711)"),
        (False, "now: Slurm no longer has the job: nothing requeued it, submit it again"),
    ],
)
def test_a_job_that_asks_for_a_requeue_says_whether_one_comes(in_slurm: bool | None, now: str) -> None:
    assert headline(build_report(drained(), START + 100.0, in_slurm=in_slurm))[2] == now


@pytest.mark.parametrize(
    ("seconds", "in_slurm", "now"),
    [
        (50.0, None, "now: requeued without n3, starts again in about 29 s"),
        (50.0, True, "now: requeued without n3, starts again in about 29 s"),
        (90.0, True, "now: requeued without n3, starts again when Slurm has nodes for it (squeue -j 4711)"),
        (90.0, False, "now: it was requeued, but Slurm no longer has it (cancelled?): submit it again"),
    ],
)
def test_a_job_that_was_requeued_says_when_it_starts_again(
    seconds: float, in_slurm: bool | None, now: str
) -> None:
    shown = headline(build_report(until(requeued(), "Requeued"), START + seconds, in_slurm=in_slurm))
    assert shown[0].startswith("job 4711 was requeued: code 75, too few nodes")
    assert shown[2] == now


@pytest.mark.parametrize(
    ("why", "now"),
    [
        (
            "job 4711 was submitted with --no-requeue",
            "now: NOT requeued: job 4711 was submitted with --no-requeue; submit it again with -x n3, or, if "
            "squeue -j 4711 shows it held, scontrol release 4711",
        ),
        (
            "job 4711 is requeued but held; release it with: scontrol release 4711",
            "now: NOT requeued: job 4711 is requeued but held; release it with: scontrol release 4711",
        ),
    ],
)
def test_a_job_that_was_not_requeued_says_why_and_what_to_do(why: str, now: str) -> None:
    w = Writer()
    w.records = not_requeued()[:-1]
    w.at(44.3, NotRequeued(why=why))
    assert headline(build_report(w.records, START + 50.0))[2] == now


def test_a_hang_that_ended_the_job_leads_to_its_stacks() -> None:
    w = trained()
    w.at(15.0, hung(5, "n3"), stacks_of(5, "n3"))
    w.at(15.3, JobEnded(code=1, why="w"))
    assert headline(build_report(w.records, START))[2].endswith(
        "read cycles/1/rank_5.stacks in the run directory"
    )


def test_a_rank_that_ran_out_of_memory_is_called_that() -> None:
    w = trained()
    oom = FaultDetected(kind=FaultKind.OOM, node="n2", rank=3, signal="SIGKILL", detector="child")
    w.at(15.0, oom)
    assert headline(build_report(w.records, START + 15.0))[1].startswith(
        "failed last: rank 3 on n2: out of memory (cycle 0"
    )


def test_every_column_fits_a_narrow_terminal() -> None:
    records = [
        Record(
            ts=record.ts,
            job=record.job,
            attempt=record.attempt,
            cycle=record.cycle,
            event=WorkersStopped(nodes=3, seconds=0.4, stalled_s=4.4)
            if isinstance(record.event, WorkersStopped)
            else record.event,
        )
        for record in requeued()
    ]
    shown = text_of(build_report(records, START + 1000.0)).splitlines()
    assert "cycle what ended it   at seen by  det stop queue form ready step  lost steps" in shown
    assert "    0 node n3 lost  0:44 stream  4.40 0.40 1m01s 1.10  2.00 1.00 1m10s     0" in shown
    assert all(len(line) <= 80 for line in shown)


# --- the last line -------------------------------------------------------------------------------------


def test_the_last_line_is_the_job_in_short() -> None:
    records = three_faults()
    assert closing(build_report(records, START)) == "finished: 3 faults, median 6.1 s lost each"
    assert closing(build_report(requeued(), START)) == "finished: 1 fault, 1m06s lost"
    assert closing(build_report(drained(), START)) == "waiting for a requeue (code 75): no fault"
    assert closing(build_report(until(records, "FaultDetected"), START + 24.4)) == (
        "running: 1 fault, none recovered yet"
    )
    assert closing(build_report(until(records, "Verdict", 1), START + 49.0)) == (
        "running: 2 faults, 1 recovered (2.2 s lost)"
    )


# --- what a terminal is not to be told -----------------------------------------------------------------


def test_text_from_the_journal_cannot_drive_the_terminal() -> None:
    w = trained()
    w.at(15.0, JobEnded(code=1, why="\x1b[2J[bold]boom[/bold]\nand\tmore\x07"))
    shown = text_of(build_report(w.records, START))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "?[2J[bold]boom[/bold] and more?" in shown


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=raw, width=80, highlight=False)
    console.print(render(build_report(three_faults(), START), zone=timezone.utc))
    raw.flush()
    shown = raw.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "# training 65.4%  = steps done again" in shown


def test_long_names_wrap_instead_of_being_cut() -> None:
    w = Writer()
    w.job_started(0.0)
    names = [f"gpu-h100-rack12-{number:04d}" for number in range(16)]
    w.cycle_starts(2.0, names)
    w.trains(4.0, 5.0, None)
    w.at(90.0, exited(1023, names[7], code=134))
    shown = text_of(build_report(w.records, START + 91.0))
    words = " ".join(shown.split())
    assert "rank 1023 on gpu-h100-rack12-0007: exit 134" in words
    assert "gpu-h100-rack12-[0000-0015]" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("height", [24, 30, 40, 50, 80])
def test_a_live_report_fits_the_terminal(height: int) -> None:
    records = three_faults()
    for length in range(1, len(records) + 1):
        report = build_report(records[:length], records[length - 1].ts + 0.1)
        console = Console(width=80, height=height, file=io.StringIO())
        with console.capture() as capture:
            console.print(frame(report, height))
        assert len(capture.get().splitlines()) < height


def test_a_long_report_shows_the_newest_and_says_what_it_hides() -> None:
    w = trained(max_restarts=1000)
    for number in range(100):
        at = 20.0 + 10 * number
        w.at(at, killed(3, "n2"))
        w.restart(at + 1, "r", "w", killed(3, "n2"))
        w.cycle_starts(at + 1.1, NODES)
        w.trains(at + 2, at + 3, 10)
    report = build_report(w.records, START + 1100.0)
    short = text_of(report)
    assert "... 61 earlier, --full shows them" in short
    assert len(short.splitlines()) < 120
    assert "earlier" not in text_of(report, lines=None)
