"""A rank's side of telling how long it takes: datagrams to the agent, and a file with the scores of all.

Nothing here waits: where the agent is behind, a period is not told, and the next one covers it no more.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvrx_slurm.pace.exchange import (
    MOST_KERNELS,
    MOST_SECTIONS,
    KernelSum,
    Name,
    Period,
    Scores,
    SectionTime,
    printable,
)
from nvrx_slurm.pace.measured import Kernel, KernelTime
from nvrx_slurm.pace.names import ToldNames
from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.flight_recorder import short_address
from nvrx_slurm.wire.page import PAGE_VARIABLE

_log = logging.getLogger(__name__)
_PAGE_NAME = re.compile(r"cycle(\d+)-rank(\d+)\.page")
_NAMES_AT_ONCE = 32
"""So that a datagram has less than 64 KiB with the longest names: of two texts, each character of 4 bytes."""
_decode_scores = msgspec.msgpack.Decoder(Scores).decode


@dataclass(frozen=True)
class SectionPeriod:
    """A section's times in one period."""

    median_ms: float
    passages: int
    individual: float | None = None
    """0 to 1: this rank's best period over this one."""


class PaceChannel:
    """Opened by :meth:`open`; one per rank and process."""

    def __init__(self, page: Path, rank: int, cycle: int, channel: socket.socket) -> None:
        self.rank = rank
        """Of the process in its cycle, whatever number it has in training now."""
        self._scores_path = rank_channel.pace_path(page)
        self._cycle = cycle
        self._socket: socket.socket | None = channel
        self._names = ToldNames()
        self._seen: tuple[int, int] | None = None

    @classmethod
    def open(cls, environ: Mapping[str, str] = os.environ) -> PaceChannel | None:
        """Return the way to this rank's agent; None: there is none, as under plain torchrun."""
        page, address = environ.get(PAGE_VARIABLE), environ.get(rank_channel.SOCKET_VARIABLE)
        # Not RANK: a restart within the process changes that.
        found = _PAGE_NAME.fullmatch(Path(page).name) if page else None
        if page is None or address is None or found is None:
            return None
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            with short_address(Path(address)) as short:
                channel.connect(short)
        except OSError as error:
            channel.close()
            _log.warning("the agent does not hear how long this rank takes: %s", error)
            return None
        channel.setblocking(False)
        return cls(Path(page), int(found[2]), int(found[1]), channel)

    def tell(
        self,
        sections: Mapping[str, SectionPeriod],
        kernels: Mapping[Kernel, KernelTime],
        *,
        iterations: int = 0,
        gpu_individual: float | None = None,
        gpu: str = "",
        gathers: bool = True,
    ) -> bool:
        """Tell one period; False: the agent could not take it now, or is gone."""
        longest = sorted(sections, key=lambda name: -sections[name].median_ms * sections[name].passages)
        heaviest = sorted(filter(_has_name, kernels), key=lambda kernel: -kernels[kernel].total_us)
        section_times = []
        for name in longest[:MOST_SECTIONS]:
            number = self._names.number(Name(printable(name)))
            if number is not None:
                each = sections[name]
                section_times.append(
                    SectionTime(number, round(each.median_ms, 6), each.passages, each.individual)
                )
        kernel_sums = []
        for kernel in heaviest[:MOST_KERNELS]:
            number = self._names.number(Name(printable(kernel.section), printable(kernel.name)))
            if number is not None:
                kernel_sums.append(
                    KernelSum(number, round(kernels[kernel].median_us, 3), round(kernels[kernel].total_us, 3))
                )
        period = Period(iterations, section_times, kernel_sums, gpu_individual, gpu, gathers)
        return self._tell_names() and self._send(
            rank_channel.PacePeriod(rank=self.rank, cycle=self._cycle, period=period)
        )

    def _tell_names(self) -> bool:
        first, untold = self._names.untold
        for start in range(0, len(untold), _NAMES_AT_ONCE):
            names = untold[start : start + _NAMES_AT_ONCE]
            if not self._send(
                rank_channel.PaceNames(rank=self.rank, cycle=self._cycle, first=first + start, names=names)
            ):
                return False
            self._names.told(len(names))
        return True

    def _send(self, request: rank_channel.RankRequest) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(rank_channel.encode_request(request), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("the agent is gone: %s", error)
            self.close()
            return False
        return True

    def scores(self) -> Scores | None:
        """Return the scores of the last report that were not returned before; None: there are none yet."""
        try:
            with self._scores_path.open("rb") as file:
                found = os.fstat(file.fileno())
                version = (found.st_ino, found.st_mtime_ns)
                if version == self._seen:
                    return None
                scores = _decode_scores(file.read())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("the scores of the ranks cannot be read: %s", error)
            return None
        self._seen = version
        return scores

    def close(self) -> None:
        """Say nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _has_name(kernel: Kernel) -> bool:
    """Tell whether it is told apart from its section: CUPTI may know no name."""
    return bool(kernel.name)
