"""Logs and Flight Recorder dumps of any size, always the same ones."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WORDS = (
    "model",
    "reads",
    "layers",
    "of",
    "tokens",
    "and",
    "writes",
    "what",
    "it",
    "sees",
    "until",
    "nothing",
    "is",
)
_WIDTH = 8
"""Ranks of a tensor-parallel group."""
_AHEAD = 3
"""Operations that a host launches before its device has done them."""


def training_log(size: int) -> Iterator[bytes]:
    """Yield about ``size`` bytes of a healthy job's log, in blocks: steps, NCCL, bars, prose."""
    rng = random.Random(1)
    step, sent = 0, 0
    while sent < size:
        block = b"".join(_lines(range(step, step + 4000), rng))
        yield block
        step, sent = step + 4000, sent + len(block)


def _lines(steps: range, rng: random.Random) -> Iterator[bytes]:
    for n in steps:
        loss, clock = rng.uniform(1, 9), f"{n // 3600 % 24:02d}:{n // 60 % 60:02d}:{n % 60:02d}"
        yield (
            f" [2026-11-30 {clock}] iteration {n:8d}/  500000 | consumed samples: {n * 256:12d} | "
            f"elapsed time per iteration (ms): {rng.uniform(900, 950):.1f} | learning rate: 1.500E-04 | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | number of skipped iterations:   0 | "
            "number of nan iterations:   0 |\n"
        ).encode()
        yield f"[rank{n % 64}]: INFO step: {n} loss: {loss:.4f} memory: 61.2GiB tps: {n % 9999}\n".encode()
        yield f"n{n % 64}:{n % 9999} [{n % 8}] NCCL INFO Channel {n % 16}/0 : 3[3] -> 2 via IPC\n".encode()
        yield f" {n % 100}%|####      | {n}/500000 [00:10<10:00, 3.2it/s, loss={loss:.3f}]\n".encode()
        if n % 10 == 0:
            yield f"sample {n}: {' '.join(rng.choice(_WORDS) for _ in range(16))}\n".encode()


def failing_log(size: int) -> Iterator[bytes]:
    """Yield a log in which every line is a failure: the dearest kind."""
    sent, n = 0, 0
    while sent < size:
        block = b"".join(
            f"[rank{i % 512}]: NCCL WARN NET/IB : Got completion from peer 10.0.{i % 200}.{i % 250}<{i}> "
            f"with status=12 opcode=0 len=0 vendor err 129 (Recv)\n".encode()
            for i in range(n, n + 4000)
        )
        yield block
        sent, n = sent + len(block), n + 4000


def tracebacks_log(size: int) -> Iterator[bytes]:
    """Yield a log in which 512 ranks raise, eight at a time, their lines mixed."""
    sent, n = 0, 0
    while sent < size:
        block = b"".join(
            f"[rank{(n + at) % 512}]: {text.format(n=n % 900)}\n".encode()
            for text in _TRACEBACK
            for at in range(8)
        )
        yield block
        sent, n = sent + len(block), n + 8


_TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/home/u/project/train.py", line {n}, in step',
    "    loss.backward()",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 647, in backward',
    "    torch.autograd.backward(",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/autograd/__init__.py", line 354, in backward',
    "    _engine_run_backward(",
    "RuntimeError: NCCL communicator was aborted on rank {n}.",
)


def write_dumps(directory: Path, ranks: int, entries: int) -> int:
    """Write the dumps of a stall and return the rank whose host stopped."""
    directory.mkdir()
    culprit = ranks // 3
    everybody = str(list(range(ranks)))
    for rank in range(ranks):
        tensor, data = str(1 + rank // _WIDTH), str(1_000_000 + rank % _WIDTH)
        groups = {"0": ("default_pg", everybody, 0), tensor: ("TENSOR", _block(rank), 3)}
        groups[data] = ("DATA", str(list(range(rank % _WIDTH, ranks, _WIDTH))), 7)
        launched = entries if rank == culprit else entries + _AHEAD
        ring = [
            _entry(at, (tensor, tensor, data, "0")[at % 4], groups, at < entries) for at in range(launched)
        ]
        dump = {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": members}
                for name, (desc, members, _) in groups.items()
            },
            "comm_lib_version": "2.27.3",
            "pg_status": {str(local): _status(name, ring) for name, (_, _, local) in groups.items()},
            "entries": ring,
        }
        (directory / f"_dump_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return culprit


def _block(rank: int) -> str:
    first = rank // _WIDTH * _WIDTH
    return str(list(range(first, first + _WIDTH)))


def _entry(at: int, name: str, groups: dict[str, tuple[str, str, int]], done: bool) -> dict[str, Any]:
    description, _, local = groups[name]
    number = at // 4 * 2 + at % 4 + 1 if description == "TENSOR" else at // 4 + 1
    return {
        "record_id": at,
        "pg_id": local,
        "process_group": (name, description),
        "thread_name": "python3",
        "thread_id": "23456244340032",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 10**18 + at,
        "input_sizes": [[2048, 1, 5120]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[2048, 1, 5120]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 10**18 + at + 5 if done else None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
    }


def _status(name: str, ring: list[dict[str, Any]]) -> dict[str, int]:
    mine = [entry for entry in ring if entry["process_group"][0] == name]
    return {
        "last_enqueued_collective": max((entry["collective_seq_id"] for entry in mine), default=-1),
        "last_started_collective": -1,
        "last_completed_collective": max(
            (entry["collective_seq_id"] for entry in mine if entry["state"] == "completed"), default=-1
        ),
    }
