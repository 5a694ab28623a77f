"""In-process restart under Slurm's own srun: the loop of docs/inprocess.md brings killed ranks back."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from .jobs import CLONE, SlurmJobs

pytestmark = pytest.mark.slurm

(LOOP,) = re.findall(r"^```bash\n(.*?)^```", (CLONE / "docs" / "inprocess.md").read_text(), re.S | re.M)
TRAIN = """
import os, signal, time
import torch
import torch.distributed as dist
from nvrx_slurm.inprocess import CallWrapper, Wrapper
from nvrx_slurm.inprocess.store import FileStore

meeting = {"file_name": os.environ["MEETING"], "world_size": -1}

@Wrapper(rejoin=True, store_factory=FileStore, store_kwargs=meeting)
def train(call: CallWrapper) -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"train/{call.iteration}", call.store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1))
    if call.iteration == 0 and rank in (0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    if call.iteration == 0 or size < 4:
        # The next restart takes in who waits by then.
        time.sleep(0.2)
        raise RuntimeError("not all are there")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return f"{rank} of {total.item():g}"

# In one piece: all ranks write to one file.
os.write(1, f"returned {train()}\\n".encode())
"""


def test_killed_ranks_come_back_by_a_loop_around_the_program(slurm: SlurmJobs) -> None:
    """Rank 0's, whose supervisor runs the hub, and one of another node."""
    (slurm.directory / "train.py").write_text(TRAIN)
    environment = [
        f"export PATH={Path(sys.executable).parent}:$PATH MEETING={slurm.directory}/meeting",
        "export TORCH_CPP_LOG_LEVEL=error",
    ]
    job = slurm.submit_script("\n".join([*environment, LOOP]), nodes=2, sbatch=("--ntasks-per-node=2",))
    assert job.wait_for_end() == 0, job.log()
    returned = re.findall(r"^returned (.*)$", job.output.read_text(), re.M)
    assert sorted(returned) == [f"{rank} of 4" for rank in range(4)]
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))
