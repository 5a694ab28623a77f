"""Flight Recorder traces of a hang: fetched from every live rank before anything is killed, then written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvrx_slurm.whole_file import replace_file
from nvrx_slurm.wire.flight_recorder import short_address

BUFFER_ENTRIES = 2000
MAX_TRACE_BYTES = 64 * 1024 * 1024
_BUFFER_VARIABLES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
_PREFIX_VARIABLES = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
"""The second is the old name, which torch still reads, with a warning."""
_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
"""Of NCCL's recorder, where this torch has NCCL, and of that for all other backends."""


class NoTraceError(Exception):
    """A rank has given no trace; the message says why."""


@dataclass(frozen=True)
class Trace:
    """What one rank's recorder holds, as torch writes it in JSON."""

    rank: int
    pid: int
    time: float
    """Unix seconds."""
    data: bytes


def recorder_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Return what switches the recorder on, where the user has not said otherwise."""
    size = {} if _BUFFER_VARIABLES & user.keys() else {"TORCH_FR_BUFFER_SIZE": str(BUFFER_ENTRIES)}
    return {**size, "TORCH_NCCL_DUMP_ON_TIMEOUT": user.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")}


def prefix_environment(user: Mapping[str, str], run_dir: str, cycle: int) -> dict[str, str]:
    """Return where torch itself writes a trace when NCCL's watchdog ends a collective; it appends the rank.

    The directory is there: the cycle's logs are in it.
    """
    if _PREFIX_VARIABLES & user.keys():
        return {}
    return {"TORCH_FR_DUMP_TEMP_FILE": f"{run_dir}/cycles/{cycle}/nccl_trace_rank_"}


def traces_dir(run_dir: str, cycle: int) -> Path:
    return Path(run_dir, "cycles", str(cycle), "flight_recorder")


async def fetch_trace(rank: int, pid: int, path: Path, timeout_s: float) -> Trace:
    """Ask the server of a rank.

    Raises:
        NoTraceError: there is none, or it does not answer in time.
    """
    try:
        data = await asyncio.wait_for(_fetch_newest(path), timeout_s)
    except (FileNotFoundError, ConnectionError):
        raise NoTraceError("it has no RankMonitorClient, or has not imported torch.distributed") from None
    except asyncio.TimeoutError:
        raise NoTraceError(f"torch's server in it did not answer within {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise NoTraceError(f"torch's server in it: {error}") from None
    return Trace(rank, pid, time.time(), data)


async def _fetch_newest(path: Path) -> bytes:
    """Return the first trace with an entry, or if there is none the last."""
    body = b""
    for handler in _HANDLERS:
        answer = await _ask(path, handler)
        if answer is not None:
            body = answer
            if b'"record_id"' in body:
                break
    if not body:
        raise ValueError("it knows no Flight Recorder")
    return body


async def _ask(path: Path, handler: str) -> bytes | None:
    """Return the answer's body, None if there is no such handler.

    Raises:
        ValueError: the answer is cut off, too long or none.
    """
    with short_address(path) as address:
        reader, writer = await asyncio.open_unix_connection(address)
    try:
        writer.write(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = head.split(" ", 2)[1:2]
        if status == ["404"]:
            return None
        length = next((line[15:] for line in head.split("\r\n") if line.startswith("content-length:")), "")
        if status != ["200"] or not 0 < int(length) <= MAX_TRACE_BYTES:
            raise ValueError(f"it answered {head.splitlines()[0]!r:.100}")
        return await reader.readexactly(int(length))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ValueError(f"the answer is cut off: {error}") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def write_trace(folder: Path, trace: Trace, node: str, job: str, cycle: int) -> None:
    """Write ``rank_R`` and beside it ``rank_R.manifest.json``, mode 0600, each complete or not at all.

    Raises:
        OSError: the run directory can't be written.
    """
    manifest = {
        "rank": trace.rank,
        "node": node,
        "job": job,
        "cycle": cycle,
        "pid": trace.pid,
        "time": trace.time,
        "format": "torch Flight Recorder, JSON",
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(folder / f"rank_{trace.rank}.manifest.json", msgspec.json.encode(manifest))
    replace_file(folder / f"rank_{trace.rank}", trace.data)
