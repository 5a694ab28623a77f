"""Runs ``nvrx-launch`` as a user would: one launcher per node, all nodes on this machine."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
from harness import BIN, MARK, PATIENCE_S, LocalJob, clean_environment, until

from nvrx_slurm import linux

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from bench.ports import free_port

COLD = ("--warm-start", "off")


def meeting(nnodes: str, port: int | None = None, run_id: str = "one") -> tuple[str, ...]:
    """The options of launchers that meet on this machine."""
    endpoint = f"127.0.0.1:{port or free_port()}"
    return (
        *COLD,
        "--nnodes",
        nnodes,
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        run_id,
        "--rdzv-endpoint",
        endpoint,
    )


class LaunchedJob(LocalJob):
    """One job of some launchers, called by the names of their nodes."""

    def __init__(self, root: Path, script: str, *options: str, real_torch: bool = False) -> None:
        self.root = root
        self.run_dir = root / "run"
        self.script = root / "train.py"
        self.script.write_text(textwrap.dedent(script))
        self.mark = uuid.uuid4().hex
        self._local = root / "local"
        self._local.mkdir()
        self.options = options
        self.arguments: list[str] = []
        self.environment = {
            **{k: v for k, v in clean_environment().items() if not k.startswith("PET_")},
            "PYTHONPATH": "" if real_torch else str(self.stub_torch),
            "RES_OPTIONS": "timeout:1 attempts:1",
            "NVRX_NODE_LOCAL_TMPDIR": str(self._local),
            "NVRX_RUN_DIR": str(self.run_dir),
            MARK: self.mark,
            "TEST_FOLDER": str(root),
        }
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self, node: str = "n1", *options: str, **environment: str) -> LaunchedJob:
        """Start the launcher of one node."""
        with (self.root / f"{node}.out").open("wb") as out, (self.root / f"{node}.err").open("wb") as err:
            self.launchers[node] = subprocess.Popen(
                [
                    str(BIN / "nvrx-launch"),
                    # See LocalJob.
                    *("--ft-attribution", "off"),
                    *("--local-addr", "127.0.0.1" if node == "n1" else node),
                    *self.options,
                    *options,
                    str(self.script),
                    *self.arguments,
                ],
                env={**self.environment, "TEST_NODE": node, **environment},
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=functools.partial(linux.die_with_parent, signal.SIGTERM, _test_process()),
            )
        return self

    def launch_all(self, *nodes: str) -> LaunchedJob:
        """Start the launchers of several nodes; the first coordinates."""
        conf = "" if "--rdzv-conf" not in self.options else self.options[-1] + ","
        for node in nodes:
            self.launch(node, "--rdzv-conf", f"{conf}is_host={int(node == nodes[0])}")
        return self

    def code(self, node: str = "n1", patience_s: float = PATIENCE_S) -> int:
        """The exit code of a launcher, once it has one."""
        try:
            return self.launchers[node].wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{node} goes on after {patience_s:g} s:\n{self.said(node)}") from None

    def codes(self, patience_s: float = PATIENCE_S) -> dict[str, int]:
        return {node: self.code(node, patience_s) for node in self.launchers}

    def said(self, node: str = "n1") -> str:
        return (self.root / f"{node}.err").read_text()

    def shown(self, node: str = "n1") -> str:
        """Its standard output."""
        return (self.root / f"{node}.out").read_text()

    @property
    def stderr(self) -> str:
        return "".join(f"--- {node}\n{self.said(node)}" for node in self.launchers)

    def _node_of(self, process: psutil.Process) -> str | None:
        with contextlib.suppress(psutil.Error):
            return process.environ().get("TEST_NODE")
        return None

    def kill(self, *processes: psutil.Process) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_node(self, node: str) -> None:
        """SIGKILL to all that runs on a node, as if it lost power."""
        # Stopped first: nothing of the node may see, and tell, that another process of it ends.
        stopped: set[psutil.Process] = set()
        while running := set(self.on(node)) - stopped:
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped |= running
        until(
            f"nothing of {node} is left",
            lambda: not [self.kill(process) for process in self.on(node)],
        )

    def close(self) -> None:
        for launcher in self.launchers.values():
            launcher.kill()
            launcher.wait()
        self.kill_processes()


def _test_process() -> int:
    return psutil.Process().pid


@contextlib.contextmanager
def launched_jobs(folder: Path) -> Iterator[functools.partial[LaunchedJob]]:
    """Make jobs whose processes are gone afterwards."""
    jobs: list[LaunchedJob] = []

    def make(script: str, *options: str, **keywords: object) -> LaunchedJob:
        root = folder / f"job{len(jobs)}"
        root.mkdir()
        jobs.append(LaunchedJob(root, script, *options, **keywords))  # type: ignore[arg-type]
        return jobs[-1]

    try:
        yield functools.partial(make)
    finally:
        for job in jobs:
            job.close()
