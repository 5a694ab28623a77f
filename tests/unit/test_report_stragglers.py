"""``nvrx-report stragglers``: what the journal tells of slow ranks, on any terminal and on none."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_journals import Writer, write
from rich.console import Console

from nvrx_slurm.journal import (
    CycleStarted,
    JobEnded,
    JobSlowed,
    NodeExcluded,
    RankScores,
    Record,
    StragglerKept,
    StragglerReport,
)
from nvrx_slurm.pace import KernelLoss
from nvrx_slurm.report.stragglers import SCHEMA, buckets, build_stragglers, document
from nvrx_slurm.report.stragglers_render import ranks_that_fit, render

PYTHON = [sys.executable, "-c", "from nvrx_slurm.cli.report import main; main(prog_name='nvrx-report')"]
ENVIRON = {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", "TZ": "UTC"}


def journal(reports: int = 6) -> list[Record]:
    """Rank 2 of 4 is slow, and ever slower; then its node leaves."""
    w = Writer()
    w.at(1.0, CycleStarted(world_size=4, nodes=["n1", "n2"], spares=["n3"]))
    for report in range(reports):
        score = round(0.7 - 0.1 * report * 3 / reports, 3)
        w.at(
            10.0 + report,
            RankScores(
                compared=4,
                missing=0,
                median=1.0,
                sections=["load", "step"],
                ranks=[2, 3, 0, 1],
                scores=[score, 0.97, 1.0, 1.0],
                worst_in=[0, 1, 1, 1],
                nodes={"n2": (score + 0.97) / 2, "n1": 1.0},
            ),
        )
    verdict = StragglerReport(
        rank=2,
        node="n2",
        section="load",
        score=0.5,
        lost_ms=12.5,
        reports=3,
        of_reports=3,
        gpu="GPU-7",
        kernels=[KernelLoss(kernel="gemm", lost_ms=4.0)],
        context=["throttled: hw thermal slowdown", "92 °C"],
    )
    w.at(20.0, verdict)
    w.at(21.0, JobSlowed(section="step", score=0.5, ranks=4, reports=2, of_reports=3))
    w.at(22.0, StragglerKept(node="n1", why="there is no spare to take its place"))
    w.at(23.0, NodeExcluded(node="n2", reason="rank 2 is slow: load takes 12.5 ms longer than elsewhere"))
    w.at(24.0, NodeExcluded(node="n9", reason="did not stop its workers within 30 s"))
    w.at(25.0, JobEnded(code=0, why="all 4 ranks exited with 0"))
    return w.records


def shown(records: list[Record], width: int = 80, top: int = 16) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(render(build_stragglers(records), top))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_model_has_each_rank_where_it_ran_and_its_trend() -> None:
    found = build_stragglers(journal())
    worst = found.ranks[0]
    assert (worst.rank, worst.node, worst.section, worst.named) == (2, "n2", "load", 1)
    assert found.trend(worst) < -0.1
    assert [own.rank for own in found.ranks] == [2, 3, 0, 1]
    assert list(found.nodes) == ["n2", "n1"]
    assert [node for _, node, _ in found.excluded] == ["n2"], "only for being slow"


def test_it_is_readable_at_80_columns_without_colour() -> None:
    text = shown(journal(reports=500))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert text.startswith("job 4711: slow: rank 2 on n2\n")
    row = next(line for line in text.splitlines() if line.startswith("rank 2 n2"))
    assert set(row.removeprefix("rank 2 n2").strip()) <= set("4567")
    healthy = next(line for line in text.splitlines() if line.startswith("rank 0 n1"))
    assert set(healthy.removeprefix("rank 0 n1").strip()) == {"·"}
    for part in (
        "12.5",
        "3 of 3",
        "GPU-7",
        "gemm loses 4 ms",
        "92 °C",
        "took up to 2 times as long as before",
    ):
        assert part in text, text


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    assert max(map(len, shown(journal(reports=500), width=40).splitlines())) <= 40


@pytest.mark.parametrize(("reports", "columns"), [(0, 5), (3, 5), (5, 5), (17, 5)])
def test_columns_cover_every_report_once(reports: int, columns: int) -> None:
    found = buckets(reports, columns)
    assert [report for column in found for report in column] == list(range(reports))
    assert len(found) <= columns


def test_a_journal_without_reports_says_so() -> None:
    assert shown([]).startswith("no report on slow ranks in this journal")


def test_the_document_has_what_the_view_has() -> None:
    found = document(build_stragglers(journal()), top=1)
    assert (found["schema"], len(found["ranks"]), len(found["reports"])) == (SCHEMA, 1, 6)
    assert found["ranks"][0]["verdict"]["lost_ms"] == 12.5
    assert found["kept"][0]["node"] == "n1"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, "stragglers", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        env=ENVIRON,
        check=False,
    )


def test_the_command_prints_a_view_a_document_and_files(tmp_path: Path) -> None:
    write(journal(), tmp_path / "journal.jsonl")
    svg, html = tmp_path / "view.svg", tmp_path / "view.html"
    done = run(tmp_path, "--svg", svg, "--html", html)
    assert (done.returncode, done.stderr) == (0, "")
    assert "slow: rank 2 on n2" in done.stdout
    assert svg.read_text().startswith("<svg")
    assert "rank" in html.read_text()
    found = json.loads(run(tmp_path, "--json").stdout)
    assert found["schema"] == "nvrx.stragglers.v1"


def test_followed_in_a_pipe_it_prints_what_is_new_of_slow_ranks_and_the_view_at_the_end(
    tmp_path: Path,
) -> None:
    write(journal(), tmp_path / "journal.jsonl")
    done = run(tmp_path, "--follow")
    assert (done.returncode, done.stderr) == (0, "")
    first = done.stdout.splitlines()[0]
    assert "rank 2 on n2: load takes 12.5 ms longer than elsewhere" in first
    assert "job 4711: slow: rank 2 on n2" in done.stdout


def test_a_run_that_is_not_there_is_refused_in_one_sentence() -> None:
    done = run("/nonexistent/run")
    assert done.returncode == 2
    assert done.stderr.startswith("nvrx-report: /nonexistent/run does not exist")


# --- large jobs, long ones, and journals that others have written -----------------------------------------


def scores(worst: dict[int, float], compared: int, **more: Any) -> RankScores:
    values: dict[str, Any] = {
        "compared": compared,
        "missing": 0,
        "median": 1.0,
        "sections": ["step"],
        "ranks": list(worst),
        "scores": list(worst.values()),
        "worst_in": [0] * len(worst),
    }
    return RankScores(**values | more)


def test_a_report_in_which_others_are_the_worst_counts_as_a_good_one() -> None:
    w = Writer()
    nodes = [f"n{number}" for number in range(100)]
    w.at(0.0, CycleStarted(world_size=200, nodes=nodes, spares=[]))
    for number in range(9):
        # Rank 7 is slow all the time; each of the others once, and then more so.
        w.at(
            60.0 * number, scores({7: 0.6, 20 + number: 0.4}, 200, nodes={"n3": 0.8, f"n{10 + number}": 0.7})
        )
    w.at(600.0, CycleStarted(world_size=198, nodes=[*nodes[:3], *nodes[4:]], spares=[]))
    for number in range(3):
        w.at(660.0 + number, scores({7: 0.9}, 198, nodes={"n4": 0.95}))
    found = build_stragglers(w.records)
    slow, *_ = found.ranks
    assert (slow.rank, slow.node, slow.mean, slow.fine) == (7, "n3", pytest.approx(0.6), 0)
    (once,) = [own for own in found.ranks if own.rank == 22]
    assert (once.node, once.mean, once.fine) == ("n11", pytest.approx(1 - 0.6 / 9), 8)
    assert found.trend(once) == pytest.approx(0.2)
    assert next(iter(found.nodes.items())) == ("n3", pytest.approx(0.8))
    assert document(found, 1)["more_ranks"] == len(found.ranks) - 1 == 10


def test_values_that_can_be_none_of_a_coordinator_are_left_out() -> None:
    w = Writer()
    w.at(0.0, CycleStarted(world_size=4, nodes=["n1", "n2"], spares=[]))
    w.at(1.0, scores({-1: 0.5, 0: -1e308, 1: 1e308, 2: 0.5, 10**9: 0.6}, 4, median=7.0, nodes={"n1": -2.0}))
    w.at(2.0, scores({2: 0.5}, 4, worst_in=[9], sections=[]))
    found = build_stragglers(w.records)
    assert [(own.rank, own.node) for own in found.ranks] == [(2, "n2"), (10**9, "?")]
    assert (found.reports[0].median, found.nodes) == (1.0, {})
    assert re.search(r"^rank 2 n2 +55$", shown(w.records), re.MULTILINE)


def test_long_names_leave_the_numbers_their_room() -> None:
    w = Writer()
    w.at(0.0, CycleStarted(world_size=1, nodes=["node" * 20], spares=[]))
    verdict = StragglerReport(
        rank=0, node="node" * 20, section="section" * 20, score=0.5, lost_ms=1234.5, reports=2, of_reports=3
    )
    kernel = KernelLoss(kernel="_ZN2at6native" * 90, lost_ms=4.0)
    w.at(1.0, scores({0: 0.5}, 1), msgspec.structs.replace(verdict, kernels=[kernel]))
    w.at(100_000.0, scores({0: 0.5}, 1))
    text = shown(w.records)
    assert max(map(len, text.splitlines())) <= 80
    (row,) = [line for line in text.splitlines() if "1234" in line]
    assert row.split()[0] == "0"
    assert row.split()[-3:] == ["2", "of", "3"]
    assert re.search(r"2 reports, [\d:]+ to \w+ \d\d [\d:]+\n", text), "on another day"
    assert text.count("_ZN2at6native") < 6


def test_a_live_view_fits_its_terminal() -> None:
    for lines in (24, 50, 100):
        top = ranks_that_fit(lines, 16)
        w = Writer()
        w.at(0.0, CycleStarted(world_size=32, nodes=[f"n{n}" for n in range(32)], spares=[]))
        worst = dict.fromkeys(range(32), 0.6)
        w.at(1.0, scores(worst, 32, nodes={f"n{n}": 0.6 for n in range(32)}))
        assert len(shown(w.records, top=top).splitlines()) <= lines
    assert ranks_that_fit(5, 16) == 1
    assert ranks_that_fit(500, 16) == 16
