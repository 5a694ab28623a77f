"""`examples/train_gpt.py`, with the time of each phase of its start written down.

Takes the example's options. With NVRX_BENCH_MARKS=DIR every process writes a file of its own in DIR, one
JSON object a line. The first says which process it is and when its first line of Python ran:

    {"mark": "main", "t": <unix seconds>, "rank": 3, "world": 8, "node": "n2", "pid": 21, "pid_ns": "pid:[…]"}

and the others how far it is: {"mark": "imported|process_group|loaded|step", "t": <unix seconds>, "step": n}.
SIGRTMIN makes it hang, the signal after it makes it fail. NVRX_BENCH_PEER_CLIENT=1 sends the heartbeats that
NVIDIA's launcher wants, too.
"""

import time

_FIRST_LINE = time.time()

import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TextIO  # noqa: E402


class Marks:
    """One process's file. Written line by line, so that a SIGKILL loses nothing that was marked."""

    def __init__(self, folder: str | None) -> None:
        self._file: TextIO | None = None
        if folder:
            name = f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}.jsonl"
            self._file = open(Path(folder) / name, "x", buffering=1)  # noqa: SIM115
        self._write(
            mark="main",
            t=_FIRST_LINE,
            rank=int(os.environ.get("RANK", "0")),
            world=int(os.environ.get("WORLD_SIZE", "1")),
            node=os.uname().nodename,
            pid=os.getpid(),
            pid_ns=os.readlink("/proc/self/ns/pid"),
        )

    def __call__(self, phase: str, step: int = 0) -> None:
        self._write(mark=phase, t=time.time(), step=step)

    def _write(self, **mark: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(mark) + "\n")


class PeerHeartbeats:
    """Marks, and after each step a heartbeat to NVIDIA's rank monitor."""

    def __init__(self, marks: Marks) -> None:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        self._marks = marks
        self._client = RankMonitorClient()

    def __call__(self, phase: str, step: int = 0) -> None:
        if phase == "loaded":
            self._client.init_workload_monitoring()
        elif phase == "step":
            self._client.send_heartbeat()
        self._marks(phase, step)


def hang(*_: object) -> None:
    while True:
        time.sleep(3600.0)


def fail(*_: object) -> None:
    raise RuntimeError("the benchmark's exception")


if __name__ == "__main__":
    marks = Marks(os.environ.get("NVRX_BENCH_MARKS"))
    signal.signal(signal.SIGRTMIN, hang)
    signal.signal(signal.SIGRTMIN + 1, fail)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import train_gpt

    # The example's first calls into torch import this, for as long as torch itself took. Done here, it counts
    # as the import that it is, and the time until the process group is ready is that of the process group.
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401
    on_phase = PeerHeartbeats(marks) if os.environ.get("NVRX_BENCH_PEER_CLIENT") else marks
    marks("imported")
    train_gpt.main(on_phase=on_phase)
