"""The job's directory: whose it is, and where things are."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.coordinator import run_dir
from nvrx_slurm.coordinator.preparation import first_cycle
from nvrx_slurm.coordinator.run_dir import RunDir, RunDirError
from nvrx_slurm.journal import CycleStarted, JobEnded, JournalVersionError, JournalWriter


def test_the_layout_is_the_contract(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    assert directory.journal == tmp_path / "journal.jsonl"
    assert directory.rank_log(2, 7) == tmp_path / "cycles/2/rank_7.log"
    assert directory.merged_log(2) == tmp_path / "cycles/2/merged.log"


def test_a_new_directory_is_its_owners_alone(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "a" / "b")
    os.close(directory.claim())
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory.path / "coordinator.lock").stat().st_mode) == 0o600


def test_two_cannot_have_it_at_once(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    first = directory.claim()
    with pytest.raises(RunDirError, match="in use by another nvrx-srun: wait for it, or choose another"):
        directory.claim()
    os.close(first)
    os.close(directory.claim())


def test_the_claim_ends_with_its_process(tmp_path: Path) -> None:
    claim = f"from nvrx_slurm.coordinator.run_dir import *; RunDir(Path({str(tmp_path)!r})).claim(); "
    subprocess.run([sys.executable, "-c", claim + "os._exit(0)"], check=True, timeout=250)
    os.close(RunDir(tmp_path).claim())


def test_somebody_elses_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RunDirError, match=f"belongs to uid {os.getuid()}: choose another with --run-dir"):
        RunDir(tmp_path).claim()


def test_a_place_where_nothing_can_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/self/nvrx")):
        with pytest.raises(RunDirError) as error:
            RunDir(path).claim()
        assert str(path) in str(error.value)
        assert "--run-dir or NVRX_RUN_DIR" in str(error.value)


def test_cycles_count_on_over_requeues(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    assert first_cycle(directory) == 0
    journal = JournalWriter(directory.journal, "1", 0)
    assert first_cycle(directory) == 0
    for cycle in (0, 1):
        journal.append(cycle, CycleStarted(world_size=1, nodes=["n1"], spares=[]))
    journal.append(5, JobEnded(code=75, why="too few nodes"))
    journal.close()
    assert first_cycle(directory) == 2


def test_a_journal_of_a_newer_version_is_not_continued(tmp_path: Path) -> None:
    line = '{"v":99,"ts":1,"job":"1","attempt":0,"cycle":0,"event":"cycle_started"}\n'
    RunDir(tmp_path).journal.write_text(line)
    with pytest.raises(JournalVersionError):
        first_cycle(RunDir(tmp_path))
