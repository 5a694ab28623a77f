"""The command line of each launcher, with the same script, nodes, ranks and restart budget."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm.slurm import AgentStep

CLONE = Path(__file__).resolve().parents[3]
WORKER = CLONE / "benchmarks" / "recovery_worker.py"
RANKS_PER_NODE = 2
TRAINING_NODES = 4
WORLD = RANKS_PER_NODE * TRAINING_NODES
MAX_RESTARTS = 3
# Small enough that two cores can step eight ranks many times a second; never ends by itself.
_WORKER_OPTIONS = (
    *("--steps", "1000000", "--ckpt-every", "5", "--step-delay", "0.05", "--backend", "gloo"),
    *("--layers", "1", "--heads", "2", "--width", "32", "--batch", "2", "--block", "16"),
)
# What a launcher or a user's shell may have left in the environment and would take for its own.
_FOREIGN = ("SLURM_", "SBATCH_", "SALLOC_", "PET_", "TORCHELASTIC_", "NVRX_", "PYTHONPATH")


class Store(str, enum.Enum):
    """Whose TCPStore torchrun's ranks meet on; see docs/benchmarks.md."""

    OWN = "own"
    SHARED = "shared"


@dataclass(frozen=True)
class Place:
    """Where one trial happens."""

    nodes: tuple[str, ...]
    """The first hosts the others' rendezvous, so it is never the victim. Beyond TRAINING_NODES: spares."""
    directory: Path
    port: int
    heartbeat_s: float | None = None
    """The time-out of ranks' heartbeats; None: the launcher's default."""

    @property
    def marks(self) -> Path:
        return self.directory / "marks"

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def worker(self) -> tuple[str, ...]:
        return (str(WORKER), *_WORKER_OPTIONS, "--out", str(self.directory / "train"))

    @property
    def heartbeat(self) -> tuple[str, ...]:
        """The option that ours and the peer's have for it; torchrun knows no heartbeats."""
        return () if self.heartbeat_s is None else ("--ft-rank-heartbeat-timeout", f"{self.heartbeat_s:g}")

    @property
    def spares(self) -> int:
        return len(self.nodes) - TRAINING_NODES


@dataclass(frozen=True)
class Contender:
    """One launcher: ``who`` in the document's rows, and what to run inside the allocation."""

    who: str
    command: Callable[[Place], Sequence[str]]
    environ: Mapping[str, str] = field(default_factory=dict)


def ours() -> Contender:
    return Contender("ours", _nvrx_srun)


def torchrun(store: Store) -> Contender:
    # Shared, torch's default, is where its restart fails: ranks read the addresses of the former attempt.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if store is Store.OWN else {}
    program = _beside_python("torchrun")
    return Contender("torchrun", lambda place: _elastic(place, program), environ)


def peer(environment: Path) -> Contender:
    program = str(environment / "bin" / "ft_launcher")
    # Its environment has our client from the clone, for the script imports it under every launcher.
    return Contender(
        "peer",
        lambda place: _elastic(place, program, "--ignore-missing-fault-tol-cfg", *place.heartbeat),
        {"PYTHONPATH": str(CLONE), "NVRX_BENCH_PEER_CLIENT": "1"},
    )


def allocation(contender: Contender, place: Place, job_name: str) -> list[str]:
    """Return the whole command: an allocation of exactly these nodes, and the launcher in it."""
    return [
        "salloc",
        *("--quiet", "--no-kill", "--exclusive", f"--job-name={job_name}"),
        *("-N", str(len(place.nodes)), "-w", ",".join(place.nodes)),
        *contender.command(place),
    ]


def environment(contender: Contender, place: Place, cluster: Mapping[str, str]) -> dict[str, str]:
    """Return what the launcher and its ranks see: the same for all, but for what one of them needs."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **own,
        **cluster,
        "OMP_NUM_THREADS": "1",
        "NVRX_BENCH_MARKS": str(place.marks),
        **contender.environ,
    }


def _nvrx_srun(place: Place) -> Sequence[str]:
    return (
        _beside_python("nvrx-srun"),
        *("--nproc-per-node", str(RANKS_PER_NODE), "--spares", str(place.spares)),
        *("--max-restarts", str(MAX_RESTARTS), "--run-dir", str(place.run_dir)),
        *place.heartbeat,
        *place.worker,
    )


def _elastic(place: Place, program: str, *options: str) -> Sequence[str]:
    """torchrun's line; one launcher per node, carried by the srun line that carries our agents."""
    launcher = (
        program,
        # Exactly so many nodes: a launcher beyond them waits and takes the place of one that is lost.
        *("--nnodes", str(TRAINING_NODES), "--nproc-per-node", str(RANKS_PER_NODE)),
        *("--max-restarts", str(MAX_RESTARTS), "--rdzv-backend", "c10d", "--rdzv-id", "bench"),
        *("--rdzv-endpoint", f"{place.nodes[0]}:{place.port}"),
        *options,
        *place.worker,
    )
    return AgentStep(nodes=place.nodes, command=launcher).argv()


def _beside_python(name: str) -> str:
    return str(Path(sys.prefix) / "bin" / name)
