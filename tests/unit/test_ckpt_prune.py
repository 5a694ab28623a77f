"""``nvrx-ckpt prune``, and the order in which it sees checkpoints."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.checkpointing import inspection, storage
from nvrx_slurm.checkpointing.inspection import Checkpoint, Kind, State
from nvrx_slurm.checkpointing.retention import age, superfluous
from nvrx_slurm.cli.ckpt import main
from tests.unit.test_ckpt_cli import save_directory, states


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def one(name: str, modified: float = 0.0, state: State = State.COMMITTED) -> Checkpoint:
    return Checkpoint(Path(name), Kind.FILE, state, 1, modified)


def old(found: list[Checkpoint], keep: int) -> list[str]:
    return [each.name for each in superfluous(found, keep, lambda _each: True)]


def removed(*arguments: str | Path) -> list[str]:
    document = json.loads(run("prune", *arguments, "--json").stdout)
    assert document["failed"] == {}
    return sorted(Path(path).name for path in document["removed"])


@pytest.mark.parametrize(
    "names",
    [
        ("step_2.pt", "step_10.pt", "step_100.pt"),
        ("iter_0000009", "iter_0000010"),
        ("epoch=1-step=900.ckpt", "epoch=2-step=1000.ckpt", "epoch=10-step=1001.ckpt"),
        ("epoch_2_loss_0.9.pt", "epoch_10_loss_0.1.pt"),
        ("model_7b_500.pt", "model_7b_1000.pt"),
        ("2026-01-09", "2026-01-10", "2026-11-01"),
        ("global_step9-loss0.5.pt", "global_step10-loss0.4.pt"),
    ],
)
def test_the_number_in_a_name_tells_the_order_whatever_the_times_of_files_say(names: tuple[str, ...]) -> None:
    copied = [one(name, modified=-number) for number, name in enumerate(names)]
    assert [each.name for each in sorted(copied, key=age)] == list(names)
    assert old(copied, keep=1) == list(names[:-1])


def test_names_that_differ_in_more_than_numbers_do_not_push_each_other_out() -> None:
    found = [one(name) for name in ("step_1.pt", "step_2.pt", "step_1", "step_2", "last.pt", "best_loss.pt")]
    assert set(old(found, keep=1)) <= {"step_1.pt", "step_1", "last.pt", "best_loss.pt"}
    ranks = [one(f"rank{rank}_step_{step}.pt") for rank in range(2) for step in (1, 2)]
    assert sorted(old(ranks, keep=1)) == ["rank0_step_1.pt", "rank1_step_1.pt"]


def test_without_a_number_the_time_of_the_commit_tells() -> None:
    assert old([one("a.pt", 2.0), one("b.pt", 1.0), one("c.pt", 3.0)], keep=1) == ["b.pt", "a.pt"]


@given(
    st.lists(
        st.tuples(st.sampled_from(State), st.integers(0, 30), st.floats(0, 9), st.booleans()), max_size=12
    ),
    st.integers(1, 4),
)
def test_as_many_good_ones_as_are_to_be_kept_stay_and_what_may_be_written_now(
    drawn: list[tuple[State, int, float, bool]], keep: int
) -> None:
    found = [one(f"s{n}_step_{step}.pt", when, state) for n, (state, step, when, _) in enumerate(drawn)]
    whole = {each.path for each, (*_, is_whole) in zip(found, drawn, strict=True) if is_whole}
    gone = superfluous(found, keep, lambda each: each.path in whole)
    good = [each for each in sorted(found, key=age) if each.state is State.COMMITTED and each.path in whole]
    assert not set(good[-keep:]) & set(gone)
    assert set(good[:-keep]) <= set(gone)
    last = max((each.modified for each in good[-keep:]), default=-1.0)
    place = {each.path: n for n, each in enumerate(sorted(found, key=age))}
    for each in set(gone) - set(good):
        assert each.state is not State.UNREADABLE
        assert place[each.path] < place[good[-1].path]
        is_beyond_them = len(good) >= keep and place[each.path] < place[good[-keep].path]
        if not (each.state is State.COMMITTED and is_beyond_them):  # such go, whole or not
            assert each.modified < last


def test_a_copy_with_new_times_is_pruned_by_step(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        storage.save({"step": step}, tmp_path / f"step_{step}.pt")
        save_directory(tmp_path / f"dcp_{step}", {"w": torch.ones(2)})
    for number, path in enumerate(sorted(tmp_path.rglob("*"), key=lambda path: path.name, reverse=True)):
        os.utime(path, (1_000_000 + number,) * 2)
    assert removed(tmp_path, "--keep", "1") == ["dcp_1", "dcp_2", "step_1.pt", "step_2.pt"]


def test_a_directory_knows_when_it_was_committed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        save_directory(tmp_path / name, {"w": torch.ones(2)})
    os.utime(tmp_path / "second/.metadata", (1, 1))
    assert [each.name for each in inspection.find(tmp_path)] == ["first", "second"]


def test_a_file_that_torch_is_writing_under_its_final_name_does_not_count(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.ones(500)}, tmp_path / f"step_{step}.pt")
    content = (tmp_path / "step_2.pt").read_bytes()
    (tmp_path / "step_3.pt").write_bytes(content[: len(content) // 2])
    assert removed(tmp_path, "--keep", "1") == ["step_1.pt"]
    assert states("ls", tmp_path) == {"step_2.pt": "committed", "step_3.pt": "committed"}


def test_a_directory_whose_ranks_have_not_all_written_stays_also_below_a_newer_step(tmp_path: Path) -> None:
    save_directory(tmp_path / "step_200", {"w": torch.ones(2)})
    save_directory(tmp_path / "step_100", {"w": torch.ones(2)})  # training went back, and is here again
    (tmp_path / "step_100/.metadata").unlink()
    assert removed(tmp_path, "--keep", "1") == []
    for path in (tmp_path / "step_100").iterdir():
        os.utime(path, (1, 1))
    assert removed(tmp_path, "--keep", "1") == ["step_100"]


def test_what_is_being_written_is_not_even_shown_as_old(tmp_path: Path) -> None:
    for step in (1, 2):
        save_directory(tmp_path / f"step_{step}", {"w": torch.ones(2)})
    with storage.replacing(tmp_path / "step_1" / "__0_0.1234.distcp"):
        assert removed(tmp_path, "--keep", "1", "--dry-run") == []
    assert removed(tmp_path, "--keep", "1", "--dry-run") == ["step_1"]


def test_to_keep_nothing_is_refused(tmp_path: Path) -> None:
    storage.save({}, tmp_path / "a.pt")
    result = run("prune", tmp_path, "--keep", "0")
    assert result.exit_code == 2
    assert "0 is not in the range" in result.stderr
    assert (tmp_path / "a.pt").exists()


def test_two_at_a_time_and_a_list_meanwhile_do_not_stumble_over_each_other(tmp_path: Path) -> None:
    for step in range(12):
        storage.save({"step": step}, tmp_path / f"step_{step}.pt")
        save_directory(tmp_path / f"dcp_{step}", {"w": torch.ones(2)})
    results: list[Any] = []

    def prune() -> None:
        found = inspection.find(tmp_path)
        together.wait(30)
        results.append([inspection.remove(e) for e in superfluous(found, 2, inspection.is_whole)])

    def look() -> None:
        together.wait(30)
        results.append([inspection.find(tmp_path), inspection.torn_files(tmp_path)])

    together = threading.Barrier(3)
    threads = [threading.Thread(target=each) for each in (prune, prune, look)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(results) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"step_10.pt", "step_11.pt", "dcp_10", "dcp_11"}


def without_power_over_modes(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a user for whom permissions count; root has to give that up."""

    def give_up() -> None:
        for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP

    return subprocess.run(
        [sys.executable, "-c", "from nvrx_slurm.cli.ckpt import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=give_up,
    )


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """What can't be read beside what can; a directory from which nothing can be removed."""
    for step in (1, 2):
        storage.save({"step": step}, tmp_path / f"step_{step}.pt")
    save_directory(tmp_path / "step_0", {"w": torch.ones(2)})
    save_directory(tmp_path / "step_1", {"w": torch.ones(2)})
    storage.save({}, tmp_path / "secret.pt")
    (tmp_path / "secret.pt").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "step_0").chmod(0o500)
    return tmp_path


def test_what_a_user_can_not_read_is_said_so_and_hides_nothing_else(closed: Path) -> None:
    listed = json.loads(without_power_over_modes("ls", closed, "--json").stdout)["checkpoints"]
    assert {Path(each["path"]).name: each["state"] for each in listed} == {
        "step_1.pt": "committed",
        "step_2.pt": "committed",
        "step_0": "committed",
        "step_1": "committed",
        "secret.pt": "committed",
        "closed": "unreadable",
    }
    verified = without_power_over_modes("verify", closed, "--json")
    assert verified.returncode == 1
    found = {Path(e["path"]).name: (e["state"], e["why"]) for e in json.loads(verified.stdout)["checkpoints"]}
    assert found["secret.pt"] == ("unreadable", f"{closed}/secret.pt: Permission denied")
    assert found["step_0"][0] == "intact"


def test_what_can_not_be_removed_is_said_and_the_rest_is_removed(closed: Path) -> None:
    result = without_power_over_modes("prune", closed, "--keep", "1", "--json")
    document = json.loads(result.stdout)
    assert result.returncode == 1
    assert [Path(path).name for path in document["removed"]] == ["step_1.pt"]
    assert document["failed"] == {f"{closed}/step_0": f"{closed}/step_0/.metadata: Permission denied"}
    assert (closed / "step_0/.metadata").exists()
    (closed / "closed").rmdir()
