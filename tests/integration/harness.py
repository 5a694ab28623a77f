"""Runs ``nvrx-srun`` with real agents and ranks on this machine; only Slurm itself is a stand-in.

``srun`` starts one real ``nvrx-agent`` per node and passes signals on; ``scontrol`` answers from files. Every
process of a job carries a mark in its environment, so that what is left of it can be found wherever it went.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from nvrx_slurm import journal, linux
from nvrx_slurm.journal import Record, read_journal

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
MARK = "TEST_JOB_MARK"
PATIENCE_S = 120.0
"""Bounds a hang. On a busy machine a job alone takes half a minute to start."""
JOB_ID = str(os.getpid())
"""Of this test run alone: two Coordinators in one job are refused."""

T = TypeVar("T")
Event = TypeVar("Event", bound=journal.Event)


def until(what: str, condition: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Return what ``condition`` returns once it is true."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.01)
    return value


def is_alive(process: psutil.Process) -> bool:
    """The very process that was found then, not another that has its number now."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class LocalJob:
    """One job of ``nvrx-srun``, and what can be seen and done from outside."""

    stand_ins = HERE / "stand_ins"
    stub_torch = HERE / "stub_torch"

    def __init__(
        self,
        root: Path,
        script: str,
        *options: str,
        nodes: int = 1,
        ranks: int = 2,
        arguments: Sequence[str] = (),
        real_torch: bool = False,
        **environment: str,
    ) -> None:
        """``script`` is the ranks' program; ``real_torch``: it or the warm start needs more than a stub."""
        self.root = root
        self.run_dir = root / "run"
        self.script = root / "train.py"
        self.script.write_text(textwrap.dedent(script))
        self.mark = uuid.uuid4().hex
        self.slurm = root / "slurm"
        self.slurm.mkdir()
        for name, text in {"state": "RUNNING", "nodes": f"n[1-{nodes}]", "excluded": "(null)"}.items():
            (self.slurm / name).write_text(text + "\n")
        self._local = root / "local"
        self._local.mkdir()
        self._argv = [
            str(BIN / "nvrx-srun"),
            # This machine's health says nothing of a job, and what ended a cycle costs processor time to find
            # out; tests of these switch them on again.
            *("--run-dir", str(self.run_dir), "--nproc-per-node", str(ranks)),
            *("--health", "off", "--ft-attribution", "off", *options),
            *(str(self.script), *arguments),
        ]
        self._environment = {
            **clean_environment(),
            "PATH": f"{self.stand_ins}:{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": "" if real_torch else str(self.stub_torch),
            # Names of nodes are not to be looked up for long.
            "RES_OPTIONS": "timeout:1 attempts:1",
            "SLURM_JOB_ID": JOB_ID,
            "NVRX_NODE_LOCAL_TMPDIR": str(self._local),
            "TEST_SLURM": str(self.slurm),
            "TEST_SRUN_CALLS": str(root / "srun_calls"),
            MARK: self.mark,
            "TEST_FOLDER": str(root),
            **environment,
        }
        self._coordinator: subprocess.Popen[bytes] | None = None
        self.closed: set[str] = set()
        """Streams that nobody reads: stdout, stderr."""

    def replace_script(self, path: Path) -> None:
        """Run another file than ``train.py`` in the job's folder."""
        self._argv[self._argv.index(str(self.script))] = str(path)
        self.script = path

    def add_options(self, *options: str) -> None:
        """Put options of nvrx-srun before the script."""
        place = self._argv.index(str(self.script))
        self._argv[place:place] = options

    def start_by(self, *command: str) -> None:
        """Have ``command`` start nvrx-srun, whose words are added to it."""
        self._argv[:0] = command

    def share_run_dir(self, run_dir: Path, script: Path) -> None:
        """Run in another run directory, as the next attempt of the same job and program does."""
        script.write_text(self.script.read_text())
        self.replace_script(script)
        self._argv[self._argv.index(str(self.run_dir))] = str(run_dir)
        self.run_dir = run_dir

    def environment_of_agents(self, **environment: str) -> None:
        """Set variables for agents and ranks alone."""
        self._environment.update({f"AGENT_{name}": value for name, value in environment.items()})

    def set_in_agents(self, module: str, **bounds_s: float) -> None:
        """Give agents more time than one needs on a calm machine: set constants of a module."""
        site = self.root / "site"
        site.mkdir()
        lines = [f"    {module}.{name} = {seconds}" for name, seconds in bounds_s.items()]
        condition = "if any(word.endswith('nvrx-agent') for word in sys.orig_argv):"
        (site / "sitecustomize.py").write_text(
            "\n".join(["import sys", condition, f"    import {module}", *lines])
        )
        former = self._environment["PYTHONPATH"]
        self.environment_of_agents(PYTHONPATH=f"{site}:{former}" if former else str(site))

    def environment_of_coordinator(self, **environment: str) -> None:
        """Set variables for all, of which agents and ranks keep the former ``PATH`` and ``PYTHONPATH``."""
        for name in ("PATH", "PYTHONPATH"):
            self._environment.setdefault(f"AGENT_{name}", self._environment[name])
        self._environment.update(environment)

    # --- running -------------------------------------------------------------------------------------

    def start(self) -> LocalJob:
        with (self.root / "stdout").open("wb") as out, (self.root / "stderr").open("wb") as err:
            self._coordinator = subprocess.Popen(
                self._argv,
                env=self._environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if "stdout" in self.closed else out,
                stderr=subprocess.PIPE if "stderr" in self.closed else err,
                start_new_session=True,
                # Not even a test run that is killed leaves a job behind.
                preexec_fn=functools.partial(linux.die_with_parent, signal.SIGTERM, os.getpid()),
            )
        for stream in (self._coordinator.stdout, self._coordinator.stderr):
            if stream is not None:
                stream.close()
        return self

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Return the job's exit code, as ``Popen`` gives it."""
        assert self._coordinator is not None
        try:
            return self._coordinator.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job goes on after {patience_s:g} s:\n{self.stderr}") from None

    def run(self, patience_s: float = PATIENCE_S) -> int:
        return self.start().wait(patience_s)

    def signal(self, sig: signal.Signals) -> None:
        assert self._coordinator is not None
        self._coordinator.send_signal(sig)

    def close(self) -> None:
        """End whatever is left, by its identity."""
        if self._coordinator is not None and self._coordinator.poll() is None:
            self._coordinator.kill()
            self._coordinator.wait()
        self.kill_processes()

    def kill_processes(self) -> None:
        """End every process of the job, by its identity."""
        for _ in range(50):
            left = self.processes()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if not left:
                break
            psutil.wait_procs(left, timeout=0.1)

    # --- processes -----------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Everything of this job that runs, wherever it has gone."""
        found = []
        mark = f"{MARK}={self.mark}".encode()
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(OSError, psutil.NoSuchProcess):
                    if mark in Path(entry.path, "environ").read_bytes():
                        process = psutil.Process(int(entry.name))
                        if is_alive(process):
                            found.append(process)
        return found

    def on(self, node: str) -> list[psutil.Process]:
        """Everything of this job that runs on a node."""
        return [process for process in self.processes() if self._node_of(process) == node]

    def _node_of(self, process: psutil.Process) -> str | None:
        with contextlib.suppress(psutil.Error):
            return process.environ().get("SLURMD_NODENAME")
        return None

    def named(self, name: str, node: str | None = None) -> psutil.Process:
        """The process of that name, as ``ps`` shows it: nvrx-guardian, nvrx-agent, nvrx-warm, nvrx-rank0."""
        return until(f"{name} on {node}", lambda: self._named(name, node))

    def _named(self, name: str, node: str | None) -> psutil.Process | None:
        for process in self.processes():
            # psutil completes a short name from the command line.
            with contextlib.suppress(psutil.Error, OSError):
                here = node is None or self._node_of(process) == node
                if here and Path(f"/proc/{process.pid}/comm").read_text().strip() == name:
                    return process
        return None

    def running(self, part_of_command: str) -> psutil.Process:
        """The process whose command line holds the text: store_process, srun."""

        def find() -> psutil.Process | None:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    if part_of_command in " ".join(process.cmdline()):
                        return process
            return None

        return until(f"a process with {part_of_command}", find)

    def has_started(self, rank: int, cycle: int = 0) -> int | None:
        """The process id of a rank, as the journal tells."""
        for record in self.records:
            match record.event:
                case journal.WorkersStarted(ranks=ranks, pids=pids) if (
                    record.cycle == cycle and rank in ranks
                ):
                    return pids[ranks.index(rank)]
                case _:
                    pass
        return None

    def rank(self, rank: int, cycle: int = 0) -> psutil.Process:
        """The process of a rank that runs."""
        pid = until(f"rank {rank} of cycle {cycle} starts", lambda: self.has_started(rank, cycle))
        return psutil.Process(pid)

    def ranks(self, *ranks: int, cycle: int = 0) -> list[psutil.Process]:
        """Those of the ranks' processes that are alive."""
        pids = [self.has_started(rank, cycle) for rank in ranks]
        return [process for process in self.processes() if process.pid in pids]

    def nothing_is_left(self, patience_s: float = PATIENCE_S) -> bool:
        """No process of the job, no private file of an agent."""
        until(f"all has ended: {self._ps()}", lambda: not self.processes(), patience_s)
        until("no private directory", lambda: not list(self._local.iterdir()), patience_s)
        return True

    def _ps(self) -> list[str]:
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                lines.append(f"{process.pid} {process.name()} {process.status()} {process.cmdline()}")
        return lines

    # --- files ---------------------------------------------------------------------------------------

    @property
    def private_dirs(self) -> list[Path]:
        return list(self._local.iterdir())

    def private_dir_of(self, node: str) -> Path:
        """The agent's own directory, as its ranks' environment tells."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get("SLURMD_NODENAME") == node and "NVRX_RANK_SOCKET" in environment:
                    return Path(environment["NVRX_RANK_SOCKET"]).parent
        raise AssertionError(f"no rank runs on {node}")

    @property
    def records(self) -> list[Record]:
        try:
            return read_journal(self.run_dir / "journal.jsonl")
        except FileNotFoundError:
            return []

    def events(self, kind: type[Event]) -> list[Event]:
        return [record.event for record in self.records if isinstance(record.event, kind)]

    def wait_for(self, kind: type[Event], count: int = 1, patience_s: float = PATIENCE_S) -> Event:
        """Return the ``count``-th event of its kind, once it is there."""
        try:
            return until(
                f"{kind.__name__} number {count}", lambda: self.events(kind)[count - 1 : count], patience_s
            )[0]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.stderr}\n{self.records}") from None

    def log(self, name: str, cycle: int = 0) -> str:
        """A rank's log, or ``merged``."""
        path = self.run_dir / "cycles" / str(cycle) / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def touch(self, name: str) -> None:
        """Make the file that ranks wait for with ``wait_for``."""
        (self.root / name).touch()

    def wait_for_file(self, name: str) -> str:
        """Return what a rank has written to its folder."""
        until(f"file {name}", (self.root / name).exists)
        return (self.root / name).read_text()

    @property
    def stdout(self) -> str:
        return (self.root / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.root / "stderr").read_text()


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher or Slurm may have left in it."""
    prefixes = ("NVRX_", "TORCHELASTIC_", "SLURM", "MASTER_", "TEST_", "PYTEST_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH"}
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}


@contextlib.contextmanager
def local_jobs(folder: Path) -> Iterator[Callable[..., LocalJob]]:
    """Make jobs whose processes are gone afterwards, whatever happened."""
    jobs: list[LocalJob] = []

    def make(script: str, *options: str, **keywords: object) -> LocalJob:
        root = folder / f"job{len(jobs)}"
        root.mkdir()
        jobs.append(LocalJob(root, script, *options, **keywords))  # type: ignore[arg-type]
        return jobs[-1]

    try:
        yield make
    finally:
        for job in jobs:
            job.close()
        shutil.rmtree(folder, ignore_errors=True)


RANK = """
import os, signal, subprocess, sys, time

rank = int(os.environ["RANK"])
cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = os.environ["TEST_FOLDER"]


def wait_for(name):
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{folder}/{name}"):
        if time.monotonic() > deadline:
            sys.exit(f"nobody made {name}")
        time.sleep(0.01)


def write(name, text=""):
    with open(f"{folder}/{name}.new", "w") as file:
        file.write(str(text))
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")
"""
"""Put before a rank's program: its rank and cycle, ``wait_for`` and ``write`` files of the job's folder."""
