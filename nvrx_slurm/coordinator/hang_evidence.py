"""What an agent found out in a stop: of a hung rank, a file beside its log, and journal events."""

from __future__ import annotations

import os
from pathlib import Path

from nvrx_slurm.journal import GpuMemoryLeft, HangEvidence, TracesKept
from nvrx_slurm.wire import messages as msg

_MAX_IN_JOURNAL = 4096
_MAX_IN_FILE = 256 * 1024
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel",
    "T": "stopped",
    "t": "being traced",
    "Z": "dead",
}


def evidence_event(node: str, m: msg.HangEvidence, file: str) -> HangEvidence:
    """Return the event; of the stacks it holds the beginning only."""
    return HangEvidence(
        node=node,
        rank=m.rank,
        pid=m.pid,
        heartbeats=m.heartbeats,
        silent_s=round(m.silent_s, 3),
        sections={_plain(name)[:64]: round(age, 3) for name, age in list(m.sections.items())[:64]},
        process_state=_plain(m.process_state)[:1],
        wchan=_plain(m.wchan)[:64],
        source=_plain(m.source)[:16],
        stacks=_plain(m.stacks)[:_MAX_IN_JOURNAL],
        note=_plain(m.note)[:512],
        seconds=round(m.seconds, 3),
        file=file,
    )


def traces_event(node: str, m: msg.TracesKept) -> TracesKept:
    return TracesKept(
        node=node,
        ranks=m.ranks,
        folder=f"cycles/{m.cycle}/flight_recorder",
        seconds=round(m.seconds, 3),
        missing={rank: _plain(why)[:200] for rank, why in m.missing.items()},
    )


def gpu_memory_event(node: str, m: msg.GpuMemoryLeft) -> GpuMemoryLeft:
    return GpuMemoryLeft(
        node=node,
        gpu=_plain(m.gpu)[:64],
        used_mb=round(m.used_mb, 1),
        waited_s=round(m.waited_s, 1),
        processes=[_plain(process)[:100] for process in m.processes[:64]],
    )


def describe_evidence(node: str, m: msg.HangEvidence) -> str:
    """Return the text of the file."""
    state = _STATES.get(m.process_state, f"in state {m.process_state!r}")
    asleep = f" in {m.wchan}" if m.wchan else ""
    lines = [
        f"rank {m.rank} on {node}, cycle {m.cycle}, process {m.pid}, before it was killed as hung",
        f"last sign of life {m.silent_s:.3f} s before; {m.heartbeats} heartbeats in this cycle",
        f"process: {state}{asleep}",
        *(f"open section '{name}' for {age:.3f} s" for name, age in m.sections.items()),
    ]
    if m.note:
        lines.append(f"note: {m.note}")
    if m.kernel_stack.strip():
        lines += ["", "kernel stack:", m.kernel_stack.rstrip()]
    lines += ["", f"Python stacks ({m.source}):" if m.source else "no Python stacks", m.stacks.rstrip()]
    return _plain("\n".join(lines))[:_MAX_IN_FILE].rstrip() + "\n"


def write_evidence(path: Path, node: str, m: msg.HangEvidence) -> None:
    """Write the file, mode 0600.

    Raises:
        OSError: the run directory can't be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(describe_evidence(node, m))


def _plain(text: str) -> str:
    """Without what could drive a terminal: names in a stack are the user's."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
