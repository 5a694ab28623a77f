"""A rank that the kernel kills for lack of memory is reported so; one that somebody kills is not."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LocalJob, until

from nvrx_slurm.journal import FaultDetected, FaultKind, Verdict

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
    until("nothing is in it any more", lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_the_kernel_kills_a_rank_for_memory_then_somebody_kills_one(
    job: Callable[..., LocalJob], limited: Path
) -> None:
    it = job(SCRIPT, "--max-restarts", "2")
    it.start_by("sh", "-c", f'echo $$ > {limited}/cgroup.procs && exec "$@"', "sh")
    assert it.run() == 1, it.stderr
    faults = {r.cycle: r.event for r in it.records if isinstance(r.event, FaultDetected)}
    assert faults[0].kind is FaultKind.OOM, it.stderr
    assert f"cgroup {limited}" in faults[0].detail
    assert (faults[1].kind, faults[1].signal, faults[1].detail) == (FaultKind.SIGNAL, "SIGKILL", "")
    rules = {r.cycle: r.event.rule for r in it.records if isinstance(r.event, Verdict)}
    assert rules == {0: "out-of-memory", 1: "killed-by-signal", 2: "first-exit"}
    assert "rank 0 on n1 was killed because memory ran out" in it.stderr
    assert it.nothing_is_left()
