"""The job under test on a dev cluster: start it, see how far it is, hurt it, count what it has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import ending
from bench.soak.audit import Census
from bench.soak.plan import Kind
from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.journal import CycleStarted, FirstStep, JournalFollower, Record, WorkersStopped

CLONE = Path(__file__).resolve().parents[3]
WORKER = CLONE / "benchmarks" / "soak_worker.py"
RANKS_PER_NODE = 2
ACTIVE_NODES = 4
WORLD = RANKS_PER_NODE * ACTIVE_NODES
HEARTBEAT_TIMEOUT_S = 6
_POLL_S = 0.1
_MARK = "NVRX_SOAK_JOB"
_OWN = ("nvrx-srun", "nvrx-agent", "nvrx-guardian", "nvrx-warm", "nvrx-health")
_SLURMS = ("salloc", "srun")
_MODULES = {
    "nvrx_slurm.coordinator.store_process": "store",
    "nvrx_slurm.attribution.ended_cycle": "attribution",
}
"""Processes that are told by what they run, from their first moment on."""
_WORKER_OPTIONS = (
    *("--ckpt-every", "5", "--backend", "gloo"),
    *("--layers", "1", "--heads", "2", "--width", "32", "--batch", "2", "--block", "16"),
)
_FOREIGN = ("SLURM_", "SBATCH_", "SALLOC_", "PET_", "TORCHELASTIC_", "NVRX_", "PYTHONPATH")


class SoakError(RuntimeError):
    """The job can't go on, or what was to be done to it could not be; the message is one sentence."""


@dataclass(frozen=True)
class Place:
    """Where one job's files are; every node sees them."""

    directory: Path

    @property
    def orders(self) -> Path:
        return self.directory / "orders"

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def log(self) -> Path:
        return self.directory / "log"


class SoakJob:
    """One running job."""

    def __init__(self, place: Place, cluster: DevCluster, process: subprocess.Popen[bytes]) -> None:
        self.place = place
        self._cluster = cluster
        self._process = process
        self._journal = JournalFollower(place.run_dir / "journal.jsonl")
        self.records: list[Record] = []
        self._agents_lost: Counter[str] = Counter()

    # --- seeing --------------------------------------------------------------------------------------

    def update(self) -> Sequence[Record]:
        """Read what the journal has now."""
        with contextlib.suppress(FileNotFoundError):
            self.records.extend(self._journal.read())
        return self.records

    def losses(self) -> list[tuple[int, float]]:
        """Every logged step in order, those done again included."""
        path = self.place.directory / "train" / "loss.jsonl"
        if not path.exists():
            return []
        return [
            (entry["step"], entry["loss"]) for entry in map(json.loads, path.read_text().split("\n")[:-1])
        ]

    @property
    def trains(self) -> bool:
        """Tell whether the last thing that happened to a cycle was its first step."""
        told = [
            r.event for r in self.update() if isinstance(r.event, CycleStarted | FirstStep | WorkersStopped)
        ]
        return bool(told) and isinstance(told[-1], FirstStep)

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Return once ``condition`` holds.

        Raises:
            SoakError: not within ``seconds``, or the job has ended before.
        """
        until = time.monotonic() + seconds
        while not condition():
            if self._process.poll() is not None:
                raise SoakError(
                    f"the job ended with {self._process.returncode} before {what}: {self._tail()}"
                )
            if time.monotonic() > until:
                raise SoakError(f"not within {seconds:g} s: {what}: {self._tail()}")
            time.sleep(_POLL_S)

    def wait_for_end(self, seconds: float) -> int:
        """Return the exit code.

        Raises:
            SoakError: it does not end.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise SoakError(f"the job does not end within {seconds:g} s: {self._tail()}") from None

    def _tail(self) -> str:
        lines = self.place.log.read_text(errors="replace").splitlines()[-3:]
        return " / ".join(line.strip() for line in lines)

    @property
    def cycle(self) -> int:
        """The newest one; what is found out of an earlier one may come after its beginning."""
        return max(r.cycle for r in self.records if isinstance(r.event, CycleStarted))

    def node_of(self, rank: int) -> str:
        """Return the node of ``rank`` in the newest cycle."""
        started = next(r.event for r in reversed(self.records) if isinstance(r.event, CycleStarted))
        return started.nodes[rank // RANKS_PER_NODE]

    def census(self) -> Census:
        """Count the job's processes, and what they hold."""
        ranks = 0
        strays: list[str] = []
        descriptors: dict[str, int] = {}
        rss_mib: dict[str, float] = {}
        for process in sorted(self._processes(), key=lambda p: p.create_time()):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = self._role(process)
                if name.startswith("nvrx-rank"):
                    ranks += 1
                elif name in (*_SLURMS, "attribution"):
                    # It comes and goes with each cycle that has ended.
                    continue
                elif name in (*_OWN, "store"):
                    descriptors.setdefault(name, process.num_fds())
                    rss_mib.setdefault(name, process.memory_info().rss / 2**20)
                else:
                    strays.append(name)
        return Census(ranks, tuple(strays), descriptors, rss_mib)

    def _processes(self) -> Iterator[psutil.Process]:
        mark = f"{_MARK}={self.place.directory}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    yield process

    @staticmethod
    def _role(process: psutil.Process) -> str:
        words = process.cmdline()
        return next((role for module, role in _MODULES.items() if module in words), process.name())

    def left(self) -> list[str]:
        """Return the names of what still runs."""
        names = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                names.append(self._role(process))
        return names

    # --- hurting -------------------------------------------------------------------------------------

    def strike(self, kind: Kind, rank: int) -> float:
        """Do it, to ``rank`` or on its node; return the moment, Unix seconds.

        A loss of an agent meets the node that has had fewest.

        Raises:
            SoakError: the victim is not there.
        """
        node = self.node_of(rank)
        if kind.costs_agent or kind is Kind.NODE_LOST:
            node = self._least_hurt()
            self._agents_lost[node] += 1
        match kind:
            case _ if kind.ordered:
                fresh = self.place.orders / f".rank_{rank}"
                fresh.write_text(kind.value.removeprefix("rank_"))
                moment = time.time()
                fresh.rename(self.place.orders / f"rank_{rank}")
                return moment
            case Kind.RANK_SIGKILL:
                return self._signal(f"nvrx-rank{rank}", node, signal.SIGKILL)
            case Kind.RANK_SIGSEGV:
                return self._signal(f"nvrx-rank{rank}", node, signal.SIGSEGV)
            case Kind.RANK_SIGABRT:
                return self._signal(f"nvrx-rank{rank}", node, signal.SIGABRT)
            case Kind.RANK_STOPPED:
                return self._signal(f"nvrx-rank{rank}", node, signal.SIGSTOP)
            case Kind.SERVER_SIGKILL:
                return self._signal("nvrx-warm", node, signal.SIGKILL)
            case Kind.AGENT_SIGKILL:
                return self._signal("nvrx-agent", node, signal.SIGKILL)
            case Kind.GUARDIAN_SIGKILL:
                return self._signal("nvrx-guardian", node, signal.SIGKILL)
            case Kind.STORE_SIGKILL:
                return self._signal("store", None, signal.SIGKILL)
            case Kind.NODE_LOST:
                moment = time.time()
                self._cluster.kill_node(node)
                return moment
            case _:
                raise AssertionError(kind)

    def _least_hurt(self) -> str:
        """Return the active node that has lost its agent least often: after three times it is left out."""
        nodes = [self.node_of(rank) for rank in range(0, WORLD, RANKS_PER_NODE)]
        return min(nodes, key=lambda node: self._agents_lost[node])

    def _signal(self, name: str, node: str | None, sig: signal.Signals) -> float:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._role(process) == name and process.environ().get("SLURMD_NODENAME") == node:
                    moment = time.time()
                    process.send_signal(sig)
                    return moment
        raise SoakError(f"there is no process {name} on {node or 'this host'}")


@contextlib.contextmanager
def running(
    place: Place, cluster: DevCluster, nodes: Sequence[str], steps: int, step_delay_s: float
) -> Iterator[SoakJob]:
    """Start the job on ``nodes``, the last of which are spares; it is over at the end, whatever happens."""
    place.orders.mkdir(parents=True)
    command = [
        *("salloc", "--quiet", "--no-kill", "--exclusive", f"--job-name={place.directory.name}"),
        *("-N", str(len(nodes)), "-w", ",".join(nodes)),
        *(str(Path(sys.prefix) / "bin" / "nvrx-srun"), "--run-dir", str(place.run_dir)),
        *("--nproc-per-node", str(RANKS_PER_NODE), "--spares", str(len(nodes) - ACTIVE_NODES)),
        *("--max-restarts", "100000", "--heartbeat-timeout", f"{HEARTBEAT_TIMEOUT_S}s"),
        # The nodes are well: what is done to them is no reason to do without them.
        *("--exclude-after", "0"),
        *(str(WORKER), *_WORKER_OPTIONS, "--steps", str(steps), "--step-delay", str(step_delay_s)),
        *("--out", str(place.directory / "train")),
    ]
    environ = _environment(place, cluster.environment())
    with (
        place.log.open("wb") as log,
        ending.program(
            command,
            env=environ,
            cwd=place.directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield SoakJob(place, cluster, process)
        finally:
            cancel = ["scancel", f"--jobname={place.directory.name}"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(cancel, env=environ, stderr=subprocess.DEVNULL, timeout=30, check=False)


def _environment(place: Place, cluster: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **own,
        **cluster,
        "OMP_NUM_THREADS": "1",
        "NVRX_SOAK_ORDERS": str(place.orders),
        _MARK: str(place.directory),
    }
