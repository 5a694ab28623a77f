"""A rank that is slow when the plan says so; started by straggler_planted.py through nvrx-srun."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench.straggler.plan import REPORTS, Kind, draw

ITERATIONS = 25
_LOAD_S = 0.004
_WORK = 30_000
_PERIOD_S, _SHARE = 0.005, 0.06
"""A throttled rank runs for this share of each period, as under a CFS quota: less than what a rank gets on a
machine whose processors are much in demand, or it would hold up nobody."""


def throttle(switch: int, done: int, rank: int) -> None:
    """Hold the rank up while the last byte on ``switch`` was a 1; a process of its own, until its end.

    Each byte is answered when it is obeyed.
    """
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    on = False
    while True:
        if select.select([switch], [], [], 0 if on else None)[0]:
            told = os.read(switch, 1)
            if not told:
                os._exit(0)
            on = told == b"1"
            os.write(done, told)
        if on:
            os.kill(rank, signal.SIGSTOP)
            time.sleep(_PERIOD_S * (1 - _SHARE))
            os.kill(rank, signal.SIGCONT)
            time.sleep(_PERIOD_S * _SHARE)


def compute(amount: float) -> int:
    total = 0
    for number in range(int(_WORK * amount)):
        total += number * number
    return total


def main(seed: int, runs: int, nodes: int, ranks_per_node: int) -> None:
    reader, switch = os.pipe()
    obeyed, done = os.pipe()
    rank_pid = os.getpid()
    if os.fork() == 0:
        os.close(switch)
        throttle(reader, done, rank_pid)
    os.close(reader)

    def turn(what: bytes) -> None:
        os.write(switch, what)
        os.read(obeyed, 1)

    import torch.distributed as dist

    from nvrx_slurm.straggler import Detector

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Detector.initialize()
    for window in draw(seed, runs, nodes, ranks_per_node):
        mine = rank in window.ranks
        late = window.kind is Kind.ALL or (mine and window.kind is Kind.LOADER)
        fast = mine and window.kind is Kind.FAST
        amount = 0.1 if fast else 2.0 if mine and window.kind is Kind.WORK else 1.0
        throttled = mine and window.kind is Kind.NODE
        if throttled:
            turn(b"1")
        for report in range(REPORTS):
            for _ in range(ITERATIONS):
                with Detector.detection_section("load"):
                    time.sleep(_LOAD_S * (3.0 if late else 0.3 if fast else 1.0))
                with Detector.detection_section("compute"):
                    compute(amount)
                dist.barrier()
            if throttled and report == REPORTS - 1:
                turn(b"0")
            Detector.generate_report()
            # Two periods must not become one report of the agent's.
            dist.barrier()
    # The last report is on its way.
    time.sleep(1.0)
    Detector.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
