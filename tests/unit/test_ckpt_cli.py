"""The command ``nvrx-ckpt``."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from torch.distributed.checkpoint.api import CheckpointException

from nvrx_slurm.checkpointing import inspection, storage
from nvrx_slurm.checkpointing.async_ckpt import filesystem_async
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncRequest
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.buffers import BufferPool
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager, write_part
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import stage
from nvrx_slurm.cli.ckpt import main


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def states(*arguments: str | Path) -> dict[str, str]:
    document = json.loads(run(*arguments, "--json").stdout)
    return {Path(each["path"]).name: each["state"] for each in document["checkpoints"]}


def save_directory(path: Path, state: dict[str, Any], **how: Any) -> None:
    writer = FileSystemWriterAsync(path, **how)
    plan = save_state_dict_async_plan(state, writer)
    save, _, arguments = writer.get_save_function_and_args()
    AsyncRequest(save, arguments, [partial(save_state_dict_async_finalize, *plan)]).execute_sync()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (1_000_000_000 - seconds, 1_000_000_000 - seconds))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Whole, torn and damaged checkpoints of every kind."""
    storage.save({"w": torch.ones(4, 3), "n": 1}, tmp_path / "step_1.pt")
    torch.save({"w": torch.ones(4)}, tmp_path / "torch.pt")
    save_directory(tmp_path / "dcp", {"w": torch.ones(5, dtype=torch.bfloat16), "object": [1, 2]})
    save_directory(tmp_path / "torn", {"w": torch.ones(5)})
    (tmp_path / "torn" / ".metadata").unlink()
    (tmp_path / "empty.pt").touch()
    (tmp_path / "unrelated.txt").write_text("x")
    return tmp_path


ALL = {
    "step_1.pt": "committed",
    "torch.pt": "committed",
    "dcp": "committed",
    "torn": "torn",
    "empty.pt": "damaged",
}


def test_ls_lists_what_is_committed_and_what_is_torn(folder: Path) -> None:
    assert states("ls", folder) == ALL
    table = run("ls", folder).stdout
    assert "no .metadata: its writer has not finished" in table


def test_ls_of_an_empty_directory_says_so(tmp_path: Path) -> None:
    assert run("ls", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"


def test_verify_tells_intact_ones_from_those_that_cannot_be_told(folder: Path) -> None:
    found = states("verify", folder)
    assert found == {**ALL, "step_1.pt": "intact", "torch.pt": "no checksums", "dcp": "intact"}
    assert run("verify", folder).exit_code == 1
    for name in ("step_1.pt", "torch.pt", "dcp"):
        assert run("verify", folder / name).exit_code == 0


@pytest.mark.parametrize("damaged", ["step_1.pt", "dcp/__0_0.distcp", "dcp/.metadata"])
def test_verify_finds_a_flipped_bit(folder: Path, damaged: str) -> None:
    flip_a_bit(folder / damaged)
    result = run("verify", folder / damaged.split("/")[0])
    assert result.exit_code == 1
    assert "damaged" in result.stdout


@pytest.mark.parametrize("change", ["missing", "cut"])
def test_ls_finds_a_file_that_is_missing_or_cut_without_reading_it(folder: Path, change: str) -> None:
    data = folder / "dcp" / "__0_0.distcp"
    if change == "missing":
        data.unlink()
    else:
        os.truncate(data, 10)
    assert states("ls", folder / "dcp") == {"dcp": "damaged"}


def test_inspect_shows_tensors_of_a_file_and_of_a_directory(folder: Path) -> None:
    entries = json.loads(run("inspect", folder / "step_1.pt", "--json").stdout)["entries"]
    assert entries[0] == {"name": "w", "type": "float32", "shape": [4, 3], "size": 48}
    assert entries[1]["type"] == "int"
    entries = json.loads(run("inspect", folder / "dcp", "--json").stdout)["entries"]
    assert {"name": "w", "type": "bfloat16", "shape": [5], "size": 10} in entries
    assert "4 x 3" in run("inspect", folder / "step_1.pt").stdout


def test_inspect_executes_nothing_that_a_file_says(folder: Path) -> None:
    torch.save({"path": Path("x")}, folder / "hostile.pt")
    result = run("inspect", folder / "hostile.pt")
    assert result.exit_code == 1
    assert "hostile.pt" in result.stderr


def test_prune_keeps_the_newest_committed_ones_and_removes_leftovers(tmp_path: Path) -> None:
    for step in range(4):
        storage.save({"step": step}, tmp_path / f"step_{step}.pt")
        age(tmp_path / f"step_{step}.pt", 100 - step)
    save_directory(tmp_path / "being_written", {"w": torch.ones(5)})
    (tmp_path / "being_written" / ".metadata").unlink()
    (tmp_path / ".step_4.pt.nvrx-tmp-0123").write_text("half")
    (tmp_path / "empty.pt").touch()
    age(tmp_path / "empty.pt", 150)
    before = set(os.listdir(tmp_path))
    assert "would remove" in run("prune", tmp_path, "--keep", "2", "--dry-run").stdout
    assert set(os.listdir(tmp_path)) == before
    removed = json.loads(run("prune", tmp_path, "--keep", "2", "--json").stdout)["removed"]
    assert {Path(path).name for path in removed} == before - {"step_2.pt", "step_3.pt", "being_written"}
    assert set(os.listdir(tmp_path)) == {"step_2.pt", "step_3.pt", "being_written"}


def test_prune_leaves_what_a_save_has_replaced_or_writes_to_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, name in enumerate(("a.pt", "b.pt", "c.pt", "gone.pt")):
        storage.save({"step": step}, tmp_path / name)
        age(tmp_path / name, 100 - step)
    save_directory(tmp_path / "dcp", {"w": torch.ones(5)})
    storage.save({"step": 9}, tmp_path / "newest.pt")
    look = inspection.find

    def then_training_saves(where: Path) -> list[inspection.Checkpoint]:
        found = look(where)
        storage.save({"step": 10}, tmp_path / "a.pt")
        (tmp_path / "gone.pt").unlink()
        return found

    monkeypatch.setattr(inspection, "find", then_training_saves)
    with storage.replacing(tmp_path / "dcp" / "__0_0.1234.distcp"):
        removed = json.loads(run("prune", tmp_path, "--keep", "1", "--json").stdout)["removed"]
    assert sorted(Path(path).name for path in removed) == ["b.pt", "c.pt"]
    assert storage.load(tmp_path / "a.pt") == {"step": 10}
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_ls_bears_checkpoints_that_vanish_while_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.pt", "b.pt"):
        storage.save({}, tmp_path / name)
    look = inspection._look

    def just_before(path: Path) -> inspection.Checkpoint:
        (tmp_path / "a.pt").unlink(missing_ok=True)
        return look(path)

    monkeypatch.setattr(inspection, "_look", just_before)
    assert states("ls", tmp_path) == {"b.pt": "committed"}


def test_names_need_not_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"st\xe9p.pt")
    storage.save({"w": torch.ones(3)}, path)
    assert states("verify", path) == {path.name: "intact"}
    assert run("inspect", path).exit_code == 0


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["inspect"], ["prune", "--keep", "1", "--dry-run"]])
def test_any_name_is_shown_on_any_terminal_and_takes_none_along(tmp_path: Path, words: list[str]) -> None:
    for name in ("schön_2.pt", "schön_1.pt", "a\nb\x1b[31m.pt"):
        storage.save({"größe\x1b": torch.ones(3)}, tmp_path / name)
    where = tmp_path / "schön_2.pt" if words == ["inspect"] else tmp_path
    done = subprocess.run(
        [sys.executable, "-c", "from nvrx_slurm.cli.ckpt import main; main()", *words, where],
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace(
        "ö".encode(), rb"\xf6"
    )  # click takes a terminal without an encoding for UTF-8
    assert (rb"gr\xf6\xdfe\x1b" if words == ["inspect"] else rb"sch\xf6n_1.pt") in shown
    assert b"\x1b" not in done.stdout


def test_a_reader_that_goes_away_and_a_full_disk_are_no_tracebacks(folder: Path) -> None:
    command = [sys.executable, "-c", "from nvrx_slurm.cli.ckpt import main; main()", "ls", folder]
    for how in ([], ["--json"]):
        ours, theirs = os.pipe()
        os.close(ours)
        gone = subprocess.run([*command, *how], stdout=theirs, stderr=subprocess.PIPE, timeout=60)
        os.close(theirs)
        assert gone.stderr == b""
        with open("/dev/full", "wb") as full:
            done = subprocess.run([*command, *how], stdout=full, stderr=subprocess.PIPE, timeout=60)
        assert done.stderr == b"Error: standard output: No space left on device\n"
        assert done.returncode == 1


def test_inspect_of_what_is_no_whole_checkpoint_says_so(folder: Path) -> None:
    for name, why in {
        "torn": "no .metadata: its writer has not finished",
        "empty.pt": "",
        "unrelated.txt": "",
        ".": "is no checkpoint; it holds 5: name one",
    }.items():
        result = run("inspect", folder / name)
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert why in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_inspect_bears_metadata_of_a_framework_that_is_not_here_and_executes_none_of_it(folder: Path) -> None:
    program = (
        "import os, pickle, sys, types\n"
        "from torch.distributed.checkpoint.metadata import Metadata\n"
        "path = sys.argv[1] + '/.metadata'\n"
        "metadata = pickle.load(open(path, 'rb'))\n"
        "framework = sys.modules['framework'] = types.ModuleType('framework')\n"
        "class Own(Metadata): pass\n"
        "class Evil:\n"
        "    def __reduce__(self): return os.mkdir, (sys.argv[1] + '/evil',)\n"
        "Own.__module__, framework.Own = 'framework', Own\n"
        "own = Own(**vars(metadata)); own.more = [Evil()]\n"
        "pickle.dump(own, open(path, 'wb'))"
    )
    for manifest in (folder / "dcp").glob("nvrx-manifest-*"):
        manifest.unlink()  # written by another writer
    subprocess.run([sys.executable, "-c", program, folder / "dcp"], check=True, timeout=90)
    entries = json.loads(run("inspect", folder / "dcp", "--json").stdout)["entries"]
    assert {each["name"] for each in entries} == {"w", "object"}
    assert not (folder / "dcp/evil").exists()
    (folder / "dcp/.metadata").write_bytes(pickle.dumps({"w": 1}))
    assert "no metadata of a checkpoint" in run("inspect", folder / "dcp").stderr


def test_a_url_of_a_file_is_its_path(folder: Path) -> None:
    assert states("ls", f"file://{folder}") == ALL
    assert run("inspect", f"file://{folder}/dcp").exit_code == 0


def test_prune_of_a_checkpoint_itself_is_refused(folder: Path) -> None:
    result = run("prune", folder / "dcp", "--keep", "1")
    assert result.exit_code == 1
    assert "give the directory that it is in" in result.stderr
    assert (folder / "dcp" / ".metadata").exists()


def test_listing_and_verifying_import_no_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom nvrx_slurm.cli.ckpt import main\n"
        "main(sys.argv[1:], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    for words in (["ls", folder], ["prune", "--keep", "9", folder]):
        subprocess.run(
            [sys.executable, "-c", code, *words], check=True, timeout=250, stdout=subprocess.DEVNULL
        )


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Iterations 1 and 2 of a single rank, and a part of a third that two ranks have saved."""
    manager = LocalCheckpointManager(tmp_path, keep=3)
    for iteration in (1, 2):
        state = {"w": torch.ones(4, 3) * iteration, "list": [torch.zeros(2), 7]}
        manager.save(BasicTensorAwareStateDict(state), iteration)
    part = stage(BasicTensorAwareStateDict({"w": torch.ones(9)}), CkptID(3, 1, ""), BufferPool())
    write_part(part.seal(2, "abc"), tmp_path / "0" / "iter_0000003_1_local.pt")
    return tmp_path


def test_local_parts_are_listed_by_save_verified_and_inspected(local: Path) -> None:
    three = local / "0" / "iter_0000003_1_local.pt"
    assert states("ls", local) == {f"iteration {number}": "committed" for number in (1, 2, 3)}
    assert (
        "the parts of rank 1, of 2 ranks: the others are on other nodes, or lost" in run("ls", local).stdout
    )
    assert states("verify", local) == {f"iteration {number}": "intact" for number in (1, 2, 3)}
    entries = json.loads(run("inspect", local / "0" / "iter_0000001_0_local.pt", "--json").stdout)["entries"]
    assert [(each["name"], each["type"], each["shape"]) for each in entries] == [
        ("w", "float32", [4, 3]),
        ("list.0", "float32", [2]),
        ("list.1", "int", None),
    ]
    content = bytearray(three.read_bytes())
    content[-1] ^= 1
    three.write_bytes(content)
    assert states("ls", three) == {three.name: "committed"}
    result = run("verify", local)
    assert result.exit_code == 1
    assert "tensor 0 is not what was written" in result.stdout
    three.write_bytes(content[:100])
    assert states("ls", local)[three.name] == "damaged"


def test_prune_of_local_parts_removes_all_files_of_old_saves(local: Path) -> None:
    for iteration in (1, 2, 3):
        for path in (local / "0").glob(f"iter_000000{iteration}_*"):
            age(path, 10 - iteration)
    assert run("prune", local, "--keep", "2").exit_code == 0
    assert sorted(path.name for path in (local / "0").iterdir()) == [
        "iter_0000002_0_local.pt",
        "iter_0000003_1_local.pt",
    ]


def test_local_parts_need_no_torch(local: Path) -> None:
    test_listing_and_verifying_import_no_torch(local)


class TestFilesOfOthers:
    """Files that are whole, with right checksums, but not where they belong."""

    @pytest.fixture
    def steps(self, tmp_path: Path) -> Path:
        for step in (1, 2):
            save_directory(
                tmp_path / f"step{step}", {"w": torch.full((5,), step), "v": torch.full((5,), -step)}
            )
        return tmp_path

    def refused(self, path: Path) -> None:
        state = {"w": torch.zeros(5, dtype=torch.int64), "v": torch.zeros(5, dtype=torch.int64)}
        with pytest.raises(CheckpointException, match="not what was written"):
            dcp.load(state, storage_reader=CachedMetadataFileSystemReader(path))
        assert states("verify", path)[path.name] == "damaged"

    def test_of_another_step_is_found_by_load_and_verify(self, steps: Path) -> None:
        (steps / "step1/__0_0.distcp").replace(steps / "step2/__0_0.distcp")
        self.refused(steps / "step2")

    def test_of_another_rank_is_found_by_load_and_verify(self, steps: Path) -> None:
        save_directory(steps / "both", {"w": torch.ones(5), "v": torch.ones(5)}, thread_count=2)
        one, other = steps / "both/__0_0.distcp", steps / "both/__0_1.distcp"
        one.rename(steps / "x")
        other.rename(one)
        (steps / "x").rename(other)
        self.refused(steps / "both")

    def test_of_a_save_that_runs_at_the_same_time_fails_the_commit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writers, plans = [FileSystemWriterAsync(tmp_path / "same") for _ in range(2)], []
        for i, writer in enumerate(writers):
            plans.append(save_state_dict_async_plan({"w": torch.full((5,), i)}, writer))
            monkeypatch.setattr(filesystem_async, "_saved_to", [])  # as another job, it knows of none
        for writer in writers:
            save, _, arguments = writer.get_save_function_and_args()
            assert save is not None
            save(*arguments)
        with pytest.raises(CheckpointException, match="another save has written here meanwhile"):
            save_state_dict_async_finalize(*plans[0])
        assert states("ls", tmp_path) == {"same": "torn"}
        save_state_dict_async_finalize(*plans[1])
        loaded = {"w": torch.zeros(5, dtype=torch.int64)}
        dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(tmp_path / "same"))
        assert loaded["w"].tolist() == [1] * 5

    @pytest.mark.parametrize("name", [".metadata", "..", "train.py", "../train.py"])
    def test_a_manifest_can_not_have_other_files_removed(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / "a"
        save_directory(path, {"w": torch.ones(5)})
        (listed,) = path.glob("nvrx-manifest-*.json")
        listed.write_text(json.dumps({"files": {name: 1}}))
        (path / "train.py").touch()
        (tmp_path / "train.py").touch()
        assert states("ls", path) == {"a": "damaged"}
        save_directory(path, {"w": torch.ones(5)})
        assert states("verify", path) == {"a": "intact"}
        assert (path / "train.py").exists()
        assert (tmp_path / "train.py").exists()


def test_ls_of_a_directory_above_says_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    storage.save({"w": torch.ones(4)}, tmp_path / "run" / "step_1.pt")
    (tmp_path / "empty").mkdir()
    assert run("ls", tmp_path).output == f"no checkpoints in {tmp_path}, but in {tmp_path}/run\n"
    assert run("ls", tmp_path / "empty").output == f"no checkpoints in {tmp_path}/empty\n"
    assert states("ls", tmp_path) == {}
