"""Which of several layers training resumes from, and what it is told when one can't be saved to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.ladder import Candidate, CheckpointLadder, Layer, by_preference


class Told:
    """A journal that is a list."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def report_checkpoint_saved(self, step: int, layer: str = "") -> None:
        self.events.append(("saved", step, layer))

    def report_checkpoint_loaded(self, step: int, layer: str = "", why: str = "") -> None:
        self.events.append(("loaded", step, layer, why))


class Run:
    """A training of one rank that saves to two layers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.told = Told()
        self.local = LocalCheckpointManager(root / "local", keep=2)
        self.shared = LocalCheckpointManager(root / "shared", keep=2)
        self.ladder = CheckpointLadder.of(
            self.local, self.shared, local_every=2, shared_every=6, journal=self.told
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            self.ladder.save_if_due(step, lambda step=step: state_of(step))

    def resume(self) -> tuple[int, str]:
        loaded = self.ladder.load()
        assert loaded is not None
        assert torch.equal(loaded.state.state_dict["step"], torch.tensor(loaded.step))
        assert self.told.events[-1] == ("loaded", loaded.step, loaded.layer, loaded.why)
        return loaded.step, f"{loaded.layer}: {loaded.why}"

    def damage(self, layer: str, step: int) -> None:
        path = self.root / layer / "0" / f"iter_{step:07d}_0_local.pt"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def state_of(step: int) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict({"step": torch.tensor(step)})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def names(directory: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (directory / "0").iterdir())


def test_each_layer_has_its_own_rhythm_and_retention(run: Run) -> None:
    run.train(*range(1, 21))
    assert names(run.root / "local") == [18, 20]
    assert names(run.root / "shared") == [12, 18]
    assert [event for event in run.told.events if event[1] in (5, 6)] == [
        ("saved", 6, "local"),
        ("saved", 6, "shared"),
    ]


def test_the_newest_is_taken_wherever_it_is(run: Run) -> None:
    run.train(2, 4, 6, 8)
    assert Run(run.root).resume() == (8, "local: the newest that is whole; shared has step 6")


def test_of_one_step_the_first_layer_is_taken(run: Run) -> None:
    run.train(6)
    assert Run(run.root).resume() == (6, "local: the newest that is whole; shared has step 6")


def test_a_lost_layer_leaves_the_other(run: Run) -> None:
    run.train(6, 8)
    for path in (run.root / "local/0").iterdir():
        path.unlink()
    again = Run(run.root)
    assert again.resume() == (6, "shared: the newest that is whole; local has none")
    again.train(8)  # and the steps since then are done and saved again
    assert Run(run.root).resume()[0] == 8


def test_a_damaged_newest_is_passed_over_for_the_next_in_any_layer(run: Run) -> None:
    run.train(6, 8)
    run.damage("local", 8)
    again = Run(run.root)
    step, why = again.resume()
    assert step == 6
    assert why.startswith(
        "local: the newest that loads; shared has step 6; local step 8 can't be loaded: No "
    )
    run.damage("local", 6)
    step, why = Run(run.root).resume()
    assert (step, why.split(":")[0]) == (6, "shared")
    again.train(8)
    assert Run(run.root).resume()[0] == 8


def test_with_nothing_that_loads_training_begins_at_the_start(run: Run) -> None:
    assert run.ladder.load() is None
    run.train(6)
    run.damage("local", 6)
    run.damage("shared", 6)
    assert Run(run.root).ladder.load() is None


def test_training_goes_on_without_a_local_checkpoint_and_not_without_a_shared_one(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.local, "_save", full)
    run.train(2)
    assert run.told.events == []
    assert "training goes on without a local checkpoint: Failure during saving" in caplog.text
    run.train(6)
    assert run.told.events == [("saved", 6, "shared")]
    monkeypatch.setattr(run.shared, "_save", full)
    with pytest.raises(CheckpointingException, match="No space left"):
        run.train(12)


@pytest.fixture
def queue() -> Iterator[AsyncCallsQueue]:
    queue = AsyncCallsQueue()
    yield queue
    queue.close(abort=True)


def test_in_the_background_a_save_is_told_when_it_is_whole_and_a_failed_local_one_is_passed_over(
    tmp_path: Path,
    queue: AsyncCallsQueue,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(tmp_path)
    ladder = CheckpointLadder.of(
        run.local, run.shared, local_every=2, shared_every=6, journal=run.told, queue=queue
    )

    def save(step: int) -> None:
        ladder.save_if_due(step, lambda: state_of(step))

    save(6)
    assert run.told.events == []
    ladder.finalize(blocking=True)
    assert run.told.events == [("saved", 6, "local"), ("saved", 6, "shared")]
    assert Run(tmp_path).resume()[0] == 6

    # when a write of the local layer fails
    place_of = run.local._place_of
    monkeypatch.setattr(
        run.local, "_place_of", lambda part: tmp_path / "no" if part.iteration == 12 else place_of(part)
    )
    (tmp_path / "no").mkdir()
    save(8)
    save(12)
    ladder.finalize(blocking=True)
    assert run.told.events[2:] == [("saved", 8, "local"), ("saved", 12, "shared")]
    failed = "training goes on without a local checkpoint: Failure during saving local checkpoint from "
    assert f"{failed}iteration 12 (last valid iteration is 8): rank 0: IsADirectoryError" in caplog.text

    monkeypatch.setattr(run.shared, "_place_of", lambda part: tmp_path / "no")
    save(18)
    with pytest.raises(CheckpointingException, match="IsADirectoryError"):
        ladder.finalize(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0


def test_all_layers_are_saved_to_before_a_stop(run: Run) -> None:
    assert run.ladder.save(5, lambda: state_of(5)) == ["local", "shared"]


def test_newer_is_better_and_then_the_order_of_the_layers() -> None:
    assert by_preference([("ram", [9, 5]), ("disk", [9, 7]), ("shared", [])]) == [
        Candidate("ram", 9),
        Candidate("disk", 9),
        Candidate("disk", 7),
        Candidate("ram", 5),
    ]


def test_layers_that_can_not_be_are_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="one or more"):
        CheckpointLadder([])
    with pytest.raises(ValueError, match="a name of its own"):
        CheckpointLadder([Layer("a", run.local, 1), Layer("a", run.shared, 1)])
    with pytest.raises(ValueError, match="every=0"):
        CheckpointLadder([Layer("a", run.local, 0)])
    with pytest.raises(TypeError, match="is no Layer"):
        CheckpointLadder([run.local])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="a function that returns the state"):
        CheckpointLadder([Layer("a", run.local, 5)]).save_if_due(1, {"step": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a datetime\.timedelta"):
        LocalCheckpointManager(run.root, timeout=5)  # type: ignore[arg-type]
    assert os.listdir(run.root) == []
