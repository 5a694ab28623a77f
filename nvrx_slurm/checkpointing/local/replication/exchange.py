"""Small values and large runs of bytes between ranks, each exchange with a time-out, nothing pickled freely.

Values go as :func:`~nvrx_slurm.checkpointing.local.base_state_dict.encode` makes them. Works on the host with
gloo, and by way of the current GPU with NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nvrx_slurm.checkpointing.local.base_state_dict import decode, encode
from nvrx_slurm.checkpointing.local.completeness import ranks_text
from nvrx_slurm.checkpointing.local.errors import ExchangeError

DEFAULT_TIMEOUT = timedelta(minutes=5)
_CHUNK = 64 << 20
_T = TypeVar("_T")


class Exchange:
    """Exchanges within one process group; every member calls the same methods in the same order."""

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        self._device = torch.device("cpu")
        if "gloo" not in str(dist.get_backend(group)):
            self._device = torch.device(torch.accelerator.current_accelerator().type)
        self._attendance = Attendance(self._ranks, group)

    @property
    def is_on_host(self) -> bool:
        """Whether it needs no other device."""
        return bool(self._device.type == "cpu")

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each member, in the order of the group.

        Raises:
            ExchangeError: a member did not take part in time; says which, if that can be told.
        """
        data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        own = torch.tensor([data.numel()], device=self._device)
        lengths = [torch.empty_like(own) for _ in self._ranks]
        with self._watched("exchange of values"):
            self._wait(dist.all_gather(lengths, own, group=self._group, async_op=True))
            sizes = [int(each) for each in lengths]
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
            padded[: data.numel()] = data
            rows = [torch.empty_like(padded) for _ in self._ranks]
            self._wait(dist.all_gather(rows, padded, group=self._group, async_op=True))
        rows = [row.cpu()[:size] for row, size in zip(rows, sizes, strict=True)]
        return [decode(ctypes.string_at(row.data_ptr(), row.numel())) for row in rows]

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Fill ``tensor`` on all members with that of the global rank ``src``.

        Raises:
            ExchangeError: a member did not take part in time.
        """
        with self._watched("broadcast"):
            self._wait(dist.broadcast(tensor, src, group=self._group, async_op=True))

    def send_and_receive(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, Callable[[int], torch.Tensor]]],
    ) -> None:
        """Move runs of bytes, all at once.

        Args:
            outgoing: receiver, by its global rank, and bytes.
            incoming: sender, and what makes room for so many bytes. Between two ranks the order of what is
                sent and of what is received is the same.

        Raises:
            ExchangeError: a rank did not take part in time, or left; says which, if that can be told.
        """
        with self._watched("transfer of parts"):
            lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in incoming]
            own = [torch.tensor([data.numel()], device=self._device) for _, data in outgoing]
            self._move(
                [(to, length) for (to, _), length in zip(outgoing, own, strict=True)],
                [(sender, length) for (sender, _), length in zip(incoming, lengths, strict=True)],
            )
            room = [
                (sender, make(int(length))) for (sender, make), length in zip(incoming, lengths, strict=True)
            ]
            self._move(outgoing, room)

    def _move(
        self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Chunk by chunk: with a GPU in between, two chunks for each transfer is all that it holds."""
        chunks_out = [(to, list(data.split(_CHUNK))) for to, data in outgoing]
        chunks_in = [(sender, list(data.split(_CHUNK))) for sender, data in incoming]
        rounds = max((len(chunks) for _, chunks in [*chunks_out, *chunks_in]), default=0)
        for number in range(rounds):
            operations, arrivals = [], []
            for sender, chunks in chunks_in:
                if number < len(chunks):
                    target = chunks[number]
                    wire = target if target.device.type == self._device.type else self._like(target)
                    operations.append(dist.P2POp(dist.irecv, wire, sender, group=self._group))
                    arrivals.append((target, wire))
            for to, chunks in chunks_out:
                if number < len(chunks):
                    operations.append(
                        dist.P2POp(dist.isend, chunks[number].to(self._device), to, group=self._group)
                    )
            for work in dist.batch_isend_irecv(operations) if operations else []:
                self._wait(work)
            for target, wire in arrivals:
                if wire is not target:
                    target.copy_(wire)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self._device)

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        self._attendance.sign()
        try:
            yield
        except (
            RuntimeError
        ) as error:  # what torch.distributed raises for time-outs and lost connections alike
            absent = self._attendance.absent()
            who = (
                f"{ranks_text(absent)} did not take part"
                if absent
                else "a rank did not take part, or has left"
            )
            limit, reason = self._timeout.total_seconds(), str(error).strip().splitlines()[0]
            raise ExchangeError(
                f"{what} of local checkpoints: {who} within {limit:g} s ({reason:.200})"
            ) from error


class Attendance:
    """A list in the job's store of how many exchanges each rank has begun: who stays away has a name."""

    def __init__(self, ranks: Sequence[int], group: Any) -> None:
        self._ranks = ranks
        self._begun = 0
        self._store: Any = None
        with contextlib.suppress(Exception):  # it serves the text of an error only
            self._store = dist.PrefixStore(
                f"nvrx-checkpoint/{group.group_name}", distributed_c10d._get_default_store()
            )

    def sign(self) -> None:
        self._begun += 1
        with contextlib.suppress(Exception):
            self._store.set(str(dist.get_rank()), str(self._begun))

    def absent(self) -> list[int]:
        """Return the ranks that have begun fewer exchanges than this one."""
        absent = []
        with contextlib.suppress(Exception):
            for rank in self._ranks:
                begun = int(self._store.get(str(rank))) if self._store.check([str(rank)]) else 0
                if begun < self._begun:
                    absent.append(rank)
        return absent


_control: dict[timedelta, tuple[Any, Exchange]] = {}
"""By time-out, with the world that the group was made in."""


class Alone:
    """In place of an exchange, in a process without others."""

    def gather(self, value: _T) -> list[_T]:
        return [value]


def all_ranks(timeout: timedelta) -> Exchange | Alone:
    """Return exchanges between all ranks of the job, on gloo whatever the job trains on. All ranks call this.

    Raises:
        ExchangeError: a rank did not come within ``timeout``.
    """
    if not dist.is_initialized():
        return Alone()
    world, exchange = _control.get(timeout, (None, None))
    if exchange is None or world is not dist.group.WORLD:
        try:
            group = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"not all ranks met for local checkpoints within {timeout.total_seconds():g} s: {error}"
            ) from error
        exchange = Exchange(group, timeout)
        _control[timeout] = (dist.group.WORLD, exchange)
    return exchange
