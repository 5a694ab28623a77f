"""Runs wrapped functions of four ranks with one plug-in after the other; a program.

    python inprocess_parts_ranks.py FOLDER

Prints one JSON object: by scenario what each rank saw. Ranks are forked, so torch is imported once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from bench.ports import free_port

from nvrx_slurm.inprocess import CallWrapper, Compose, Wrapper
from nvrx_slurm.inprocess.abort import (
    AbortPersistentCheckpointProcesses,
    AbortTorchDistributed,
    AbortTransformerEngine,
)
from nvrx_slurm.inprocess.finalize import ThreadedFinalize
from nvrx_slurm.inprocess.initialize import RetryController
from nvrx_slurm.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from nvrx_slurm.inprocess.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    ShiftRanks,
    Tree,
)

RANKS = 4
Faults = list[tuple[int, str]]
"""Initial rank and kind, one for each of the first iterations."""


def fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a fault")


def never() -> None:
    threading.Event().wait()


def nested() -> dict[str, Any]:
    return {
        "initialize": Compose(NestedRestarterHandlingCompleted(), RetryController(max_iterations=2)),
        "abort": Compose(
            AbortPersistentCheckpointProcesses(),
            AbortTransformerEngine(),
            AbortTorchDistributed(),
            NestedRestarterHandlingStarting(),
        ),
        "completion": NestedRestarterFinalized(),
        "terminate": NestedRestarterAborted(),
    }


def finalize(rank: int) -> dict[str, Any]:
    hangs = rank == 1
    return {"finalize": ThreadedFinalize(timedelta(seconds=0.2 if hangs else 60), never if hangs else int)}


SCENARIOS: dict[str, tuple[Faults, Callable[[int], dict[str, Any]]]] = {
    "tree": (
        [(1, "kill")],
        lambda rank: {"rank_assignment": Tree([Layer(max_ranks=3, flag=LayerFlag.RESERVE)])},
    ),
    "divisible": (
        [(0, "kill")],
        lambda rank: {"rank_assignment": Compose(ActiveWorldSizeDivisibleBy(2), FillGaps())},
    ),
    "groups": (
        [(3, "kill")],
        lambda rank: {
            "rank_assignment": Compose(
                ActiveWorldSizeDivisibleBy(1),
                ShiftRanks(),
                FilterCountGroupedByKey(lambda state: str(state.initial_rank // 2), lambda count: count == 2),
            )
        },
    ),
    "node": ([(0, "kill")], lambda rank: {"granularity": "node"}),
    "spares": ([(1, "kill")], lambda rank: {"active_world_size": 2}),
    "finalize": ([(0, "raise")], finalize),
    "faults": ([(2, "raise"), (2, "raise")], lambda rank: {"max_rank_faults": 1}),
    "nested": ([(0, "raise")], lambda rank: nested()),
    "aborted": ([(0, "raise"), (1, "raise")], lambda rank: nested()),
}


def one_rank(rank: int, faults: Faults, more: dict[str, Any], seen: dict[str, Any]) -> None:
    def train(call: CallWrapper) -> str:
        seen["entered"].append([os.environ["RANK"], os.environ["WORLD_SIZE"]])
        if call.iteration < len(faults):
            # A fault meets ranks that are all in the function.
            call.store.barrier(f"entered{call.iteration}", int(os.environ["WORLD_SIZE"]))
            victim, kind = faults[call.iteration]
            if victim == rank:
                fail(kind)
            while True:
                threading.Event().wait(0.01)
        return os.environ["RANK"]

    try:
        seen["returned"] = Wrapper(**more)(train)()
    except BaseException as error:
        seen["raised"] = type(error).__name__
        seen["why"] = str(error)


def run(name: str, folder: Path) -> list[dict[str, Any]]:
    faults, make = SCENARIOS[name]
    port = str(free_port())
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            os.environ.update(
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
                LOCAL_WORLD_SIZE="2",
                SLURMD_NODENAME=f"n{rank // 2}",
            )
            with open(folder / f"{name}{rank}.out", "w") as out:
                os.dup2(out.fileno(), 1)
            seen: dict[str, Any] = {"entered": []}
            one_rank(rank, faults, make(rank), seen)
            sys.stdout.flush()
            (folder / f"{name}{rank}.json").write_text(json.dumps(seen))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    found = []
    for rank in range(RANKS):
        path = folder / f"{name}{rank}.json"
        seen = json.loads(path.read_text()) if path.exists() else {"killed": True}
        said = (folder / f"{name}{rank}.out").read_text().splitlines()
        found.append({**seen, "said": [line.partition("] name=[InProcess] ")[2] for line in said]})
    return found


if __name__ == "__main__":
    print(json.dumps({name: run(name, Path(sys.argv[1])) for name in SCENARIOS}))
