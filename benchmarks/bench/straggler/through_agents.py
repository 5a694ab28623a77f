"""What reports through the agents cost: the rank that tells, the Coordinator that judges 16,384 of them."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench import document
from bench.document import OURS, Row
from nvrx_slurm.coordinator.slow_ranks import scores_event
from nvrx_slurm.fault_tolerance.pace_channel import PaceChannel, SectionPeriod
from nvrx_slurm.pace import Kernel, KernelTime
from nvrx_slurm.pace.exchange import KernelSum, Name, Period, SectionTime
from nvrx_slurm.pace.job import JobPace, RankPeriod
from nvrx_slurm.wire.page import PAGE_VARIABLE
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE

RANKS, SECTIONS, KERNELS = 16_384, 8, 32


def rank_rows(repetitions: int) -> Iterator[Row]:
    """Measure how long a rank is held up by telling a period; nobody answers it."""
    for kernels in (300, 2000):
        times = {Kernel(f"kernel_{n}", "step"): KernelTime(1.0 + n, 100.0 + n) for n in range(kernels)}
        sections = {name: SectionPeriod(10.0, 100, 1.0) for name in ("load", "forward", "backward", "step")}
        took = []
        with _agent() as (channel, agent):
            for _ in range(repetitions):
                began = time.perf_counter()
                told = channel.tell(sections, times, iterations=100)
                channel.scores()
                took.append((time.perf_counter() - began) * 1e3)
                assert told
                _drain(agent)
        yield document.summarize("through the agents", OURS, f"rank, {kernels} kernels", "ms", took)


@contextmanager
def _agent() -> Iterator[tuple[PaceChannel, socket.socket]]:
    with (
        tempfile.TemporaryDirectory(prefix="nvrx-straggler-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = os.path.join(folder, "ranks.sock")
        listener.bind(path)
        listener.listen()
        page = str(Path(folder, "cycle0-rank0.page"))
        channel = PaceChannel.open({PAGE_VARIABLE: page, SOCKET_VARIABLE: path})
        assert channel is not None
        agent, _ = listener.accept()
        agent.setblocking(False)
        with agent:
            yield channel, agent
        channel.close()


def _drain(agent: socket.socket) -> None:
    try:
        while agent.recv(1 << 16):
            pass
    except BlockingIOError:
        pass


def coordinator_rows(repetitions: int) -> Iterator[Row]:
    """Measure judging a report of :data:`RANKS` ranks, and what the journal keeps of it."""
    names = [Name(f"section{n}") for n in range(SECTIONS)] + [
        Name("step", f"kernel{n}") for n in range(KERNELS)
    ]
    ranks = {
        rank: RankPeriod(
            f"node{rank // 8:05}",
            names,
            Period(
                100,
                [SectionTime(n, 10.0 + (rank * 7919 + n) % 13 / 10, 100, 1.0) for n in range(SECTIONS)],
                [
                    KernelSum(SECTIONS + n, 50.0 + (rank * 31 + n) % 7, 5000.0 + (rank * 31 + n) % 7)
                    for n in range(KERNELS)
                ],
                1.0,
                "",
            ),
        )
        for rank in range(RANKS)
    }
    pace, took = JobPace(), []
    for _ in range(repetitions):
        began = time.perf_counter()
        outcome = pace.judge(ranks)
        took.append((time.perf_counter() - began) * 1e3)
    nodes = {rank: each.node for rank, each in ranks.items()}
    line = msgspec.json.encode(scores_event(outcome.judgement.scores, nodes, RANKS))
    case = "through the agents"
    yield document.summarize(case, OURS, f"Coordinator, {RANKS:,} ranks", "ms", took)
    yield document.summarize(case, OURS, f"journal, {RANKS:,} ranks", "KiB", [len(line) / 1024])
