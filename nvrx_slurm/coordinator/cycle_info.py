"""One small JSON file per cycle, for watchers: the names and fields are those of NVIDIA's ft_launcher.

``cycle_info.<job>.<attempt>.<cycle>`` is written when the cycle begins and again when it ends, each time as
a whole; ``cycle_info.<job>.current`` leads to the newest. Added here: why the cycle ended, and the cause.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm import journal
from nvrx_slurm.journal import Record
from nvrx_slurm.slurm import compress_hostlist
from nvrx_slurm.whole_file import replace_file, replace_link


@dataclass(frozen=True)
class CycleInfo:
    """The document, in the order of its fields; times are ISO 8601 in UTC, empty while unknown."""

    job_id: str
    attempt_index: int
    cycle_number: int
    cycle_start_time: str
    cycle_end_time: str
    cycle_log_file: str
    active_nodes: str
    """Slurm's range syntax, short host names."""
    standby_nodes: str
    generation: str
    """How often the file has been written before, as text."""
    active_ranks: str
    """Group ranks, in the order of the hosts' names."""
    end_reason: str = ""
    culprit_node: str = ""
    culprit_rank: int | None = None
    culprit_kind: str = ""

    @property
    def file_name(self) -> str:
        return f"cycle_info.{_in_file_name(self.job_id)}.{self.attempt_index}.{self.cycle_number}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def current_path(directory: Path | None, job_id: str) -> str:
    """Return the path of the link to the newest cycle's file, empty without a directory."""
    return "" if directory is None else str(directory / f"cycle_info.{_in_file_name(job_id)}.current")


def _in_file_name(job_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", job_id)


class CycleInfos:
    """Follows the journal; no I/O."""

    def __init__(self, log_file: Callable[[int], Path]) -> None:
        """``log_file``: where all output of a cycle is."""
        self._log_file = log_file
        self._current: CycleInfo | None = None

    def take(self, record: Record) -> CycleInfo | None:
        """Return what is to be written now; None: nothing has changed."""
        before, info = self._current, self._current
        match record.event:
            case journal.CycleStarted() as event:
                info = self._begin(record, event)
            case journal.WorkersStopped() if info is not None and not info.cycle_end_time:
                info = dataclasses.replace(info, cycle_end_time=_time(record.ts))
            case journal.Verdict() as event if info is not None and not info.end_reason:
                info = dataclasses.replace(
                    info,
                    end_reason=event.why,
                    culprit_node=event.node or "",
                    culprit_rank=event.rank,
                    culprit_kind=event.kind.value if event.kind else "",
                )
            case journal.JobEnded() as event if info is not None:
                info = dataclasses.replace(
                    info,
                    cycle_end_time=info.cycle_end_time or _time(record.ts),
                    end_reason=info.end_reason or event.why,
                )
            case _:
                pass
        if info is None or info == before:
            return None
        if before is not None and info.cycle_number == before.cycle_number:
            info = dataclasses.replace(info, generation=str(int(before.generation) + 1))
        self._current = info
        return info

    def _begin(self, record: Record, event: journal.CycleStarted) -> CycleInfo:
        places = sorted(range(len(event.nodes)), key=lambda place: event.nodes[place])
        return CycleInfo(
            job_id=record.job,
            attempt_index=record.attempt,
            cycle_number=record.cycle,
            cycle_start_time=_time(record.ts),
            cycle_end_time="",
            cycle_log_file=str(self._log_file(record.cycle)),
            active_nodes=_hosts(event.nodes),
            standby_nodes=_hosts(event.spares),
            generation="0",
            active_ranks=_ranges(places),
        )


def _time(ts: float) -> str:
    moment = datetime.datetime.fromtimestamp(ts, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _hosts(nodes: Sequence[str]) -> str:
    short = {node if node[:1].isdigit() else node.partition(".")[0] for node in nodes}
    # Two nodes may differ in their domain only.
    return compress_hostlist(sorted(short if len(short) == len(nodes) else nodes))


def _ranges(numbers: Iterable[int]) -> str:
    """Return ``2,0-1`` for 2, 0, 1."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)


def write_cycle_info(directory: Path, info: CycleInfo) -> None:
    """Write the file and turn the link to it, each at one stroke.

    Raises:
        OSError
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(directory / info.file_name, info.to_json().encode())
    if info.generation == "0":
        replace_link(Path(current_path(directory, info.job_id)), Path(info.file_name))
