"""A save that all ranks have written counts, although none of them has lived to commit it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from roll_forward_rank import SIZE, schedule, state_of

from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvrx_slurm.checkpointing.inspection import State, find, verify

PATIENCE_S = 200.0
pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


@dataclass
class Killed:
    """Where two ranks were killed: all are committed as step 1, and step 2 was copied."""

    folder: Path
    before: dict[str, int] = field(default_factory=dict)
    """What was in each directory's ``.metadata`` before the ranks were killed, as its inode."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).parent / "roll_forward_rank.py"
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script, str(r), folder], env=environ, stdout=subprocess.PIPE)
        for r in range(2)
    ]
    try:
        lines = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
        pids = [json.loads(line) for line in lines]
        workers = [{name: psutil.Process(pid) for name, pid in each.items()} for each in pids]
        found = Killed(folder, {n: (folder / n / ".metadata").stat().st_ino for n in pids[0]})
        for each in workers:
            each["written"].kill()
        workers[1]["torn"].kill()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()  # type: ignore[union-attr]  # the workers have it, too
    for each in workers:
        each["stopped"].send_signal(signal.SIGCONT)
    _, alive = psutil.wait_procs([each for of_rank in workers for each in of_rank.values()], PATIENCE_S)
    assert not alive
    return found


def steps_in(folder: Path, **reader: object) -> set[float]:
    """Load as one process without ranks; return the steps that the parts are of."""
    state = {f"own{r}": torch.zeros(SIZE) for r in (0, 1)} | {"both": torch.zeros(9, dtype=torch.int64)}
    dcp.load(state, no_dist=True, **reader)  # type: ignore[arg-type]
    steps = {float((state[f"own{r}"] - r).unique().item()) / 10 for r in (0, 1)}
    return steps | set(map(float, state["both"].tolist()))


def test_the_last_worker_commits_what_the_killed_ranks_had_copied(killed: Killed) -> None:
    place = killed.folder / "stopped"
    assert steps_in(place, checkpoint_id=place) == {2.0}  # plain torch reads it
    assert not list(place.glob("nvrx-plan-*"))
    assert [verify(each).state for each in find(place)] == [State.INTACT]
    assert len(list(place.glob("*.distcp"))) == 2 + 1  # rank 1 has one tensor of its own


def test_where_the_workers_were_killed_too_the_next_reader_commits(killed: Killed) -> None:
    place = killed.folder / "written"
    assert (place / ".metadata").stat().st_ino == killed.before["written"]
    assert steps_in(place, storage_reader=CachedMetadataFileSystemReader(place)) == {2.0}
    assert steps_in(place, checkpoint_id=place) == {2.0}
    assert not list(place.glob("nvrx-plan-*"))
    assert [verify(each).state for each in find(place)] == [State.INTACT]


def test_what_one_rank_has_not_written_never_counts_and_the_next_save_removes_it(killed: Killed) -> None:
    place = killed.folder / "torn"
    assert steps_in(place, storage_reader=CachedMetadataFileSystemReader(place)) == {1.0}
    assert (place / ".metadata").stat().st_ino == killed.before["torn"]
    assert len(list(place.glob("*.distcp"))) == 3 + 1  # what rank 0 has written of step 2
    queue = AsyncCallsQueue()
    schedule(queue, place, rank=0, step=3)
    queue.close()
    loaded = {name: torch.zeros_like(torch.as_tensor(each)) for name, each in state_of(0, 3).items()}
    dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(place), no_dist=True)
    assert loaded["own0"].eq(30).all()
    assert sorted(path.suffix for path in place.iterdir()) == ["", ".distcp", ".distcp", ".json"]
