"""A rank that the kernel kills for lack of memory is reported so; one that somebody kills is not."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.journal import FaultDetected, FaultKind, Verdict, read_journal

LOCAL_JOB = Path(__file__).with_name("local_job.py")
LIMIT_BYTES = 1024**3
SCRIPT = """
import os, signal, sys
cycle, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
if rank:
    signal.pause()
if cycle == "0":
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(4096)) * 4096)
if cycle == "1":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3)
"""


def _memory_cgroup() -> tuple[Path, str] | None:
    """Where this process' memory cgroup is and how its limit is called."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") and (v1 / path.lstrip("/")).is_dir():
            return v1 / path.lstrip("/"), "memory.limit_in_bytes"
    root = v2 / "cgroup.subtree_control"
    if root.exists() and "memory" in root.read_text().split():
        return v2, "memory.max"
    return None


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup with a limit."""
    found = _memory_cgroup()
    if found is None:
        pytest.skip("no memory cgroup")
    base, limit = found
    folder = base / f"nvrx-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.timeout(180)
def test_the_kernel_kills_a_rank_for_memory_then_somebody_kills_one(tmp_path: Path, limited: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("NVRX_", "SLURM_"))}
    argv = [sys.executable, str(LOCAL_JOB), str(tmp_path / "run"), "1", "2", str(file), "max_restarts=2"]
    shell = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(limited / "cgroup.procs"), *argv]
    done = subprocess.run(
        shell, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 1, done.stdout
    records = read_journal(tmp_path / "run" / "journal.jsonl")
    faults = {r.cycle: r.event for r in records if isinstance(r.event, FaultDetected)}
    assert faults[0].kind is FaultKind.OOM, done.stdout
    assert f"cgroup {limited}" in faults[0].detail
    assert faults[1].kind is FaultKind.SIGNAL
    assert (faults[1].signal, faults[1].detail) == ("SIGKILL", "")
    rules = {r.cycle: r.event.rule for r in records if isinstance(r.event, Verdict)}
    assert rules == {0: "out-of-memory", 1: "killed-by-signal", 2: "first-exit"}
    assert "rank 0 on n0 was killed because memory ran out" in done.stdout
