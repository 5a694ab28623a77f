"""Names, remembered state, locks and process identities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.devcluster import files, process, state
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.process import ProcessRecord
from nvrx_slurm.devcluster.state import ClusterState, Layout, Phase

STATE = ClusterState("dev", 3, 4, 2, ("/tmp/project",), Phase.UP, "some-boot")


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setattr(state, "BASE", tmp_path / "base")
    return Layout.of("dev")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


@pytest.mark.parametrize("name", ["dev", "a", "t-1", "x" * 24])
def test_good_names(name: str) -> None:
    assert state.check_name(name) == name


@pytest.mark.parametrize("name", ["", "1dev", "Dev", "a/b", "..", "x" * 25, "dev\n", "-dev"])
def test_names_that_are_no_directory_or_host_names_are_refused(name: str) -> None:
    with pytest.raises(DevClusterError, match="no cluster name"):
        state.check_name(name)


def test_state_survives_being_saved(layout: Layout) -> None:
    layout.root.mkdir(parents=True)
    state.save(layout, STATE)
    assert state.load(layout) == STATE


def test_a_cluster_that_is_not_there_has_no_state(layout: Layout) -> None:
    assert state.load(layout) is None


def test_an_unreadable_state_names_its_file(layout: Layout) -> None:
    layout.root.mkdir(parents=True)
    layout.state_file.write_text("{}")
    with pytest.raises(DevClusterError, match=r"state\.json is not the state of a cluster"):
        state.load(layout)


def test_one_unreadable_state_does_not_stop_other_clusters(layout: Layout) -> None:
    layout.root.mkdir(parents=True)
    state.save(layout, STATE)
    broken = Layout.of("broken")
    broken.root.mkdir()
    broken.state_file.write_text("not json")
    assert state.used_slots() == (3,)


def test_a_state_of_another_version_can_still_be_taken_down() -> None:
    older = {name: value for name, value in json.loads(STATE.to_json()).items() if name != "shares"}
    assert ClusterState.from_json(json.dumps({**older, "from-the-future": 1})).index == 3


def test_a_second_command_is_refused_with_the_name_of_the_first(layout: Layout) -> None:
    layout.root.mkdir(parents=True)
    with (
        state.cluster_lock(layout, "up", 0),
        pytest.raises(DevClusterError, match=rf"\(up, process {os.getpid()}\) is working on cluster 'dev'"),
        state.cluster_lock(layout, "down", 0.05),
    ):
        pass
    with state.cluster_lock(layout, "down", 0):
        pass


def test_the_lock_of_a_cluster_that_does_not_exist_leaves_nothing(layout: Layout) -> None:
    with state.cluster_lock(layout, "up", 0):
        assert layout.lock_file.exists()
    assert not state.BASE.exists()


def test_a_record_is_of_one_process_only(sleeper: subprocess.Popen[bytes]) -> None:
    record = ProcessRecord.of(sleeper.pid)
    assert record is not None
    assert record.is_alive()
    assert not ProcessRecord(record.pid, record.start - 1).is_alive()


def test_whoever_got_the_id_of_a_recorded_process_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    record = ProcessRecord.of(sleeper.pid)
    assert record is not None
    process.kill([ProcessRecord(record.pid, record.start - 1)])
    assert record.is_alive()


def test_kill_returns_when_the_process_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    record = ProcessRecord.of(sleeper.pid)
    assert record is not None
    process.kill([record])
    assert not record.is_alive()
    process.kill([record])


@pytest.mark.parametrize("text", ["", "12", "12 x", "1 2 3"])
def test_a_torn_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "n1.pid").write_text(text)
    assert ProcessRecord.read(tmp_path / "n1.pid") is None


def test_only_directories_in_private_places_are_shared_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PRIVATE", (str(tmp_path),))
    (tmp_path / "clone" / "venv").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    wanted = [tmp_path / "clone", tmp_path / "clone" / "venv", tmp_path / "data", Path("/usr")]
    assert files.shared_directories(wanted) == (str(tmp_path / "clone"), str(tmp_path / "data"))


def test_a_private_place_as_a_whole_cannot_be_shared() -> None:
    with pytest.raises(DevClusterError, match="name a directory below it"):
        files.shared_directories(["/tmp"])
    with pytest.raises(DevClusterError, match="no such directory"):
        files.shared_directories(["/no/such/place"])


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys, nvrx_slurm.cli.devcluster as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'rich.table', 'grpc'} & set(sys.modules), 'slow imports'"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
