"""The file of each cycle, and the log of each cycle, in the layout that watchers of ft_launcher read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nvrx_slurm import journal
from nvrx_slurm.coordinator.app_log import AppLog
from nvrx_slurm.coordinator.cycle_info import CycleInfo, CycleInfos, current_path, write_cycle_info
from nvrx_slurm.journal import FaultKind, Record, VerdictAction

BEGAN = 1_700_000_000.25


def log_file(cycle: int) -> Path:
    return Path(f"/logs/train_cycle{cycle}.log")


def record(seconds: float, event: journal.events.AnyEvent, cycle: int = 0) -> Record:
    return Record(ts=BEGAN + seconds, job="7", attempt=1, cycle=cycle, event=event)


STARTED = journal.CycleStarted(world_size=8, nodes=["n3.site", "n1.site", "n2.site"], spares=["n4.site"])
VERDICT = journal.Verdict(
    action=VerdictAction.RESTART,
    rule="first",
    why="rank 3 on n1 was killed by SIGKILL",
    node="n1.site",
    rank=3,
    kind=FaultKind.SIGNAL,
)


def test_a_cycle_that_begins_is_described_with_the_fields_that_watchers_know() -> None:
    info = CycleInfos(log_file).take(record(0, STARTED))
    assert info is not None
    assert info.file_name == "cycle_info.7.1.0"
    assert json.loads(info.to_json()) == {
        "job_id": "7",
        "attempt_index": 1,
        "cycle_number": 0,
        "cycle_start_time": "2023-11-14T22:13:20.250Z",
        "cycle_end_time": "",
        "cycle_log_file": "/logs/train_cycle0.log",
        "active_nodes": "n[1-3]",
        "standby_nodes": "n4",
        "generation": "0",
        # n1 is group rank 1, n2 is 2, n3 is 0
        "active_ranks": "1-2,0",
        "end_reason": "",
        "culprit_node": "",
        "culprit_rank": None,
        "culprit_kind": "",
    }


def test_its_end_comes_with_reason_and_culprit_and_the_next_begins_anew() -> None:
    infos = CycleInfos(log_file)
    infos.take(record(0, STARTED))
    assert infos.take(record(1, journal.Progress(step=3))) is None
    stopped = infos.take(record(60, journal.WorkersStopped(nodes=3, seconds=0.1)))
    assert stopped is not None
    assert (stopped.cycle_end_time, stopped.generation) == ("2023-11-14T22:14:20.250Z", "1")
    judged = infos.take(record(60.1, VERDICT))
    assert judged is not None
    assert (judged.end_reason, judged.generation) == ("rank 3 on n1 was killed by SIGKILL", "2")
    assert (judged.culprit_node, judged.culprit_rank, judged.culprit_kind) == ("n1.site", 3, "signal")
    again = infos.take(record(61, STARTED, cycle=1))
    assert again is not None
    assert (again.cycle_number, again.generation, again.end_reason) == (1, "0", "")


def test_a_job_that_ends_well_says_so_in_its_last_file() -> None:
    infos = CycleInfos(log_file)
    infos.take(record(0, STARTED))
    info = infos.take(record(9, journal.JobEnded(code=0, why="all 8 ranks exited with 0")))
    assert info is not None
    assert (info.end_reason, info.culprit_rank) == ("all 8 ranks exited with 0", None)
    assert info.cycle_end_time == "2023-11-14T22:13:29.250Z"


def test_before_the_first_cycle_there_is_nothing_to_tell() -> None:
    assert CycleInfos(log_file).take(record(0, journal.JobEnded(code=1, why="nobody came"))) is None


def test_the_files_are_written_whole_and_the_link_leads_to_the_newest(tmp_path: Path) -> None:
    infos, folder = CycleInfos(log_file), tmp_path / "infos"
    for at, event, cycle in (
        (0.0, STARTED, 0),
        (1.0, journal.WorkersStopped(nodes=3, seconds=0.1), 0),
        (2.0, VERDICT, 0),
        (3.0, STARTED, 1),
    ):
        info = infos.take(record(at, event, cycle))
        assert info is not None
        write_cycle_info(folder, info)
    assert sorted(os.listdir(folder)) == ["cycle_info.7.1.0", "cycle_info.7.1.1", "cycle_info.7.current"]
    current = Path(current_path(folder, "7"))
    assert os.readlink(current) == "cycle_info.7.1.1"
    assert json.loads(current.read_text())["cycle_number"] == 1
    assert json.loads((folder / "cycle_info.7.1.0").read_text())["culprit_node"] == "n1.site"
    assert (folder / "cycle_info.7.1.0").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("job", ["../../etc/x", "a/b", ".."])
def test_no_job_id_leads_out_of_the_folder(tmp_path: Path, job: str) -> None:
    started = CycleInfos(log_file).take(Record(ts=BEGAN, job=job, attempt=0, cycle=0, event=STARTED))
    assert isinstance(started, CycleInfo)
    assert "/" not in started.file_name
    assert Path(current_path(tmp_path, job)).parent == tmp_path


# --- the log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "name"),
    [("train.log", "train_cycle3.log"), ("train", "train_cycle3.log"), ("a.b.txt", "a.b_cycle3.txt")],
)
def test_the_logs_name_tells_the_cycle(tmp_path: Path, prefix: str, name: str) -> None:
    assert AppLog(tmp_path / prefix).path(3) == tmp_path / name


def test_each_line_begins_with_its_rank_as_wide_as_the_highest(tmp_path: Path) -> None:
    log = AppLog(tmp_path / "logs" / "train")
    log.add(0, 3, 16, b"short 12 tokens")
    log.add(0, 12, 16, b"nul \0 here")
    log.add(1, 0, 8, b"later")
    log.flush()
    log.add(0, 4, 16, b"last words")
    log.flush()
    assert log.path(0).read_bytes() == b" 3: short 12 tokens\n12: nul <NUL> here\n 4: last words\n"
    assert log.path(1).read_bytes() == b"0: later\n"


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "train_cycle0.log").symlink_to(tmp_path / "elsewhere")
    log = AppLog(tmp_path / "train")
    log.add(0, 0, 1, b"x")
    with pytest.raises(OSError, match="symbolic links"):
        log.flush()
    assert not (tmp_path / "elsewhere").exists()
