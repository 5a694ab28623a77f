"""The recovery benchmark's arithmetic: from the marks of the workers to the rows of the document."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from nvrx_slurm.journal import CycleStarted, FaultDetected, FaultKind, Record, WorkersStopped

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import recovery  # noqa: E402
from bench import document  # noqa: E402
from bench.recovery import contenders, faults, marks, trial  # noqa: E402
from bench.recovery.contenders import Place, Store  # noqa: E402
from bench.recovery.faults import Case, FaultError  # noqa: E402
from bench.recovery.marks import Process  # noqa: E402
from bench.recovery.trial import Outcome  # noqa: E402

KILL = 100.0


def process(rank: int, main: float, world: int = 2, **more: float | None) -> Process:
    """A rank that took 1 s to import, 2 s to meet the others, 0.5 s to load and 0.25 s for its first step."""
    times = {"imported": main + 1, "process_group": main + 3, "loaded": main + 3.5, "first_step": main + 3.75}
    fields = {"resumed_at": 10, "last_step": 12, **times, **more}
    return Process(rank, world, node=f"n{rank + 1}", pid=20, pid_ns=f"pid:[{rank}]", main=main, **fields)


def record(event: object, ts: float) -> Record:
    return Record(ts=ts, job="1", attempt=0, cycle=0, event=event)


JOURNAL = [
    record(CycleStarted(world_size=2, nodes=["n1"], spares=[]), 90.0),
    record(FaultDetected(kind=FaultKind.SIGNAL, node="n1", detector="child"), 100.1),
    record(WorkersStopped(nodes=1, seconds=0.2), 100.3),
    record(CycleStarted(world_size=2, nodes=["n1"], spares=[]), 100.4),
    record(FaultDetected(kind=FaultKind.EXIT, node="n1", detector="child"), 130.0),
]


def test_a_file_of_marks_is_one_process_with_the_time_of_its_first_step() -> None:
    lines = [
        '{"mark": "main", "t": 1.0, "rank": 3, "world": 8, "node": "n2", "pid": 21, "pid_ns": "pid:[7]"}',
        '{"mark": "imported", "t": 2.0, "step": 0}',
        '{"mark": "process_group", "t": 3.0, "step": 0}',
        '{"mark": "loaded", "t": 4.0, "step": 20}',
        '{"mark": "step", "t": 5.0, "step": 21}',
        '{"mark": "step", "t": 6.0, "step": 22}',
        '{"mark": "st',
    ]
    assert marks.parse_process(lines) == Process(
        rank=3,
        world=8,
        node="n2",
        pid=21,
        pid_ns="pid:[7]",
        main=1.0,
        imported=2.0,
        process_group=3.0,
        loaded=4.0,
        resumed_at=20,
        first_step=5.0,
        last_step=22,
        last_mark=6.0,
    )


def test_a_file_without_a_whole_line_is_no_process_yet() -> None:
    assert marks.parse_process([]) is None
    assert marks.parse_process(['{"mark": "main", "t": 1.0, "ra']) is None


def test_the_worker_writes_marks_that_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    import recovery_worker

    written = recovery_worker.Marks(str(tmp_path))
    written("imported")
    written("loaded", 20)
    written("step", 21)

    (found,) = marks.read_processes(tmp_path)
    assert (found.rank, found.world, found.resumed_at, found.last_step) == (3, 8, 20, 21)
    assert found.imported is not None
    assert found.main <= found.imported


def test_recovery_is_when_every_rank_of_one_new_group_has_done_a_step() -> None:
    old = [process(0, 50.0), process(1, 50.0)]
    new = [process(0, 101.0), process(1, 102.0)]
    assert marks.whole_group(old, KILL) is None
    assert marks.whole_group([*old, new[0]], KILL) is None
    assert marks.whole_group([*old, new[0], process(1, 102.0, first_step=None)], KILL) is None
    assert marks.whole_group([*new, *old], KILL) == new


def test_an_attempt_that_never_got_to_a_step_is_passed_over() -> None:
    failed = [process(rank, 101.0, first_step=None) for rank in (0, 1)]
    second = [process(rank, 110.0) for rank in (0, 1)]
    assert marks.whole_group([*failed, *second], KILL) == second


def test_fewer_ranks_than_before_are_a_group_too_if_they_are_all_there() -> None:
    smaller = [process(rank, 101.0, world=3) for rank in (0, 1, 2)]
    beginnings = [process(rank, 101.0, world=4) for rank in (0, 1, 2)]
    assert marks.whole_group([*smaller, *beginnings], KILL) == smaller


def test_training_has_settled_when_the_newest_process_of_every_rank_has_done_enough_steps() -> None:
    ready = [process(0, 50.0, last_step=30), process(1, 50.0, last_step=31)]
    assert marks.running_group(ready, world=2, steps=20) == ready
    assert marks.running_group(ready, world=2, steps=21) is None
    assert marks.running_group(ready, world=3, steps=1) is None
    assert marks.running_group([*ready, process(1, 60.0, last_step=11)], world=2, steps=20) is None


def test_phases_end_with_the_last_rank_and_add_up_to_the_total() -> None:
    group = [process(0, 101.0), process(1, 101.5)]
    seconds = marks.phases(KILL, group, marks.journal_times(JOURNAL, KILL))

    assert seconds == pytest.approx(
        {
            "total": 5.25,
            "restart": 2.5,
            "until_start": 1.5,
            "detect": 0.1,
            "stop": 0.2,
            "form": 0.1,
            "start": 1.1,
            "import": 1.0,
            "rendezvous": 2.0,
            "load": 0.5,
            "first_step": 0.25,
        }
    )
    assert set(seconds) == set(marks.METRICS)
    assert sum(seconds[m] for m in marks.METRICS[3:]) == pytest.approx(seconds["total"])
    assert sum(seconds[m] for m in marks.METRICS[3:7]) == pytest.approx(seconds["until_start"])


def test_what_a_launcher_does_not_tell_is_left_out() -> None:
    seconds = marks.phases(KILL, [process(0, 101.0, world=1)], journal=None)
    assert not {"detect", "stop", "form", "start"} & set(seconds)
    assert sum(seconds[m] for m in marks.METRICS[7:]) + seconds["until_start"] == pytest.approx(
        seconds["total"]
    )


def test_a_journal_that_ends_in_the_middle_of_a_restart_tells_nothing() -> None:
    assert marks.journal_times(JOURNAL[:3], KILL) is None
    assert marks.journal_times(JOURNAL, 131.0) is None


def test_the_victim_is_rank_3_unless_its_node_is_the_one_to_keep() -> None:
    group = [Process(rank, 8, f"n{rank // 2 + 1}", 20, "pid:[1]", 1.0) for rank in range(8)]
    assert faults.pick_victim(group, keep="n1").rank == 3
    assert faults.pick_victim(group, keep="n2").rank == 4
    with pytest.raises(FaultError, match="no rank runs on another node than n1"):
        faults.pick_victim(group[:2], keep="n1")


def test_a_victim_that_is_gone_is_not_somebody_else() -> None:
    with pytest.raises(FaultError, match="rank 3 on n2 is gone"):
        faults.strike(Case.RANK_SIGKILL, Process(3, 8, "n2", 1, "pid:[0]", 1.0), cluster=None)


def outcomes() -> list[Outcome]:
    case = Case.RANK_SIGKILL
    return [
        *(Outcome(case, "ours", {"total": s, "detect": 0.01}, load=0.5) for s in (0.4, 0.5, 0.6)),
        Outcome(case, "torchrun", {"total": 10.0}, left_behind=2, load=4.0),
        Outcome(case, "torchrun", why_not="ended with exit code 1; it said: no", load=2.0),
        Outcome(case, "torchrun", why_not="did not train within 40 s", measured=False, load=2.0),
    ]


def test_rows_say_how_often_somebody_came_back_and_how_fast() -> None:
    rows = {(row.who, row.metric): row for row in recovery.rows_of(outcomes())}

    assert list(rows) == [
        ("ours", "recovered"),
        ("ours", "total"),
        ("ours", "detect"),
        ("torchrun", "recovered"),
        ("torchrun", "total"),
    ]
    total = rows["ours", "total"]
    assert (total.case, total.unit, total.p50, total.p90, total.n) == ("rank_sigkill", "s", 0.5, 0.58, 3)
    back = rows["torchrun", "recovered"]
    # The run in which the fault never happened is no failure to recover.
    assert (back.unit, back.p50, back.p90, back.n) == ("runs", 1, 1, 2)


def test_who_never_came_back_has_only_the_row_that_says_so() -> None:
    (row,) = recovery.rows_of([Outcome(Case.NODE_LOSS, "torchrun", why_not="ended with exit code 1")])
    assert (row.metric, row.p50, row.n) == ("recovered", 0, 1)


def test_the_document_has_the_agreed_keys_and_the_table_the_ratio() -> None:
    rows = tuple(recovery.rows_of(outcomes()))
    made = document.Document("recovery", "2 cores", "2030-01-01T00:00:00Z", rows)

    read = json.loads(made.to_json())
    assert list(read) == ["name", "machine", "date", "rows"]
    assert all(list(row) == ["case", "who", "metric", "unit", "p50", "p90", "n"] for row in read["rows"])

    out = io.StringIO()
    titles = {"rank_sigkill": "A rank is killed"}
    Console(file=out, width=80).print(document.render(made, titles, recovery.notes_of(outcomes())))
    shown = out.getvalue()
    assert "1 of 2" in shown
    (line,) = (line for line in shown.splitlines() if "total" in line)
    assert line.split() == ["total", "[s]", "0.50", "(0.58)", "10.00", "(10.00)", "20"]
    assert "rank_sigkill, torchrun, 1 times: ended with exit code 1" in shown
    assert "torchrun left 2 processes behind in 3 jobs" in shown
    assert "load average before the runs: 0.5 to 4.0" in shown


def test_percentiles_of_one_value_are_that_value() -> None:
    row = document.summarize("case", "ours", "total", "s", [0.5])
    assert (row.p50, row.p90, row.n) == (0.5, 0.5, 1)
    with pytest.raises(ValueError, match="no total of ours in case"):
        document.summarize("case", "ours", "total", "s", [])


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("first\nlast\n=======\n", "last"),
        ("RuntimeError: refused\nbye\nsrun: error: n4: task 3: Exited\n", "RuntimeError: refused"),
        ("srun: error: no such program\n", "srun: error: no such program"),
        ("x" * 500, "x" * 199 + "…"),
    ],
)
def test_the_telling_line_of_a_log_names_the_error(log: str, line: str) -> None:
    assert trial.telling_line(log) == line


def place(spares: int) -> Place:
    nodes = tuple(f"n{number}" for number in range(1, 5 + spares))
    return Place(nodes, Path("/shared/trial"), port=29400)


def test_every_contender_gets_the_same_script_nodes_ranks_and_budget(tmp_path: Path) -> None:
    lines = []
    for contender in (contenders.ours(), contenders.torchrun(Store.OWN), contenders.peer(tmp_path)):
        argv = contenders.allocation(contender, place(spares=1), "job")
        assert argv[argv.index("-w") + 1] == "n1,n2,n3,n4,n5"
        assert argv[argv.index("--nproc-per-node") + 1] == "2"
        assert argv[argv.index("--max-restarts") + 1] == "3"
        lines.append(argv[argv.index(str(contenders.WORKER)) :])
    assert lines[0] == lines[1] == lines[2]


def test_only_a_hang_needs_a_heartbeat_and_torchrun_has_none(tmp_path: Path) -> None:
    hung = Place(place(0).nodes, Path("/shared/trial"), 29400, Case.RANK_HANG.heartbeat_s)
    option = "--ft-rank-heartbeat-timeout"
    for contender in (contenders.ours(), contenders.peer(tmp_path)):
        argv = contender.command(hung)
        assert argv[argv.index(option) + 1] == "5"
        assert option not in contender.command(place(0))
    assert option not in contenders.torchrun(Store.OWN).command(hung)


def test_a_hang_counts_from_the_moment_when_its_time_out_has_passed(tmp_path: Path) -> None:
    there = Place(("n1",), tmp_path, port=1)
    there.marks.mkdir()
    (there.marks / "a.jsonl").write_text(
        '{"mark": "main", "t": 90.0, "rank": 3, "world": 8, "node": "n2", "pid": 20, "pid_ns": "pid:[3]"}\n'
        '{"mark": "step", "t": 99.9, "step": 21}\n'
    )
    victim = process(3, 90.0)
    assert trial.known_from(Case.RANK_HANG, KILL, victim, there) == pytest.approx(104.9)
    assert trial.known_from(Case.RANK_SIGKILL, KILL, victim, there) == KILL


def test_the_worker_s_signals_are_those_that_the_faults_send() -> None:
    worker = (BENCHMARKS / "recovery_worker.py").read_text()
    assert (faults.HANG_SIGNAL, faults.EXCEPTION_SIGNAL) == (signal.SIGRTMIN, signal.SIGRTMIN + 1)
    assert "signal.signal(signal.SIGRTMIN, hang)" in worker
    assert "signal.signal(signal.SIGRTMIN + 1, fail)" in worker


def test_spares_are_what_is_beyond_the_training_nodes() -> None:
    ours = contenders.ours().command(place(spares=1))
    assert ours[ours.index("--spares") + 1] == "1"
    torchrun = contenders.torchrun(Store.OWN).command(place(spares=1))
    assert torchrun[torchrun.index("--nnodes") + 1] == "4"
    assert torchrun[torchrun.index("-N") + 1] == "5"


def test_a_launcher_does_not_inherit_another_one_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("EDITOR", "ed")
    seen = contenders.environment(contenders.torchrun(Store.OWN), place(0), {"SLURM_CONF": "/etc/s"})
    assert {"SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"}.isdisjoint(seen)
    assert (seen["SLURM_CONF"], seen["EDITOR"]) == ("/etc/s", "ed")
    assert seen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    shared = contenders.environment(contenders.torchrun(Store.SHARED), place(0), {})
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in shared


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--cases", "flood"],
            "there is no case 'flood'; the cases are rank_sigkill, rank_exception, rank_hang, node_loss",
        ),
        (["--runs", "0"], "0 is not in the range 1<=x<=100"),
        (["--bound", "soon"], "'soon' is not a duration"),
        (["--peer", "other"], "'other' is not 'nvrx'"),
    ],
)
def test_bad_input_is_refused_at_once(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(recovery.main, arguments)
    assert done.exit_code == 2
    assert sentence in done.output


def test_cases_are_taken_in_the_order_given_and_once() -> None:
    assert recovery.Cases().convert("node_loss, rank_sigkill,node_loss", None, None) == (
        Case.NODE_LOSS,
        Case.RANK_SIGKILL,
    )
