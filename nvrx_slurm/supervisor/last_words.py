"""What is said of a rank that is killed: it can't say anything itself."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket

from nvrx_slurm.wire import rank_channel

_log = logging.getLogger("nvrx_slurm.supervisor")
_MOST_BYTES = 512
"""Written at once: a pipe takes so much whole, or not at all (pipe(7))."""


class LastWords:
    """The rank's standard error, held until the rank ends, and the way to its agent, if it has one."""

    def __init__(self) -> None:
        try:
            self._stderr: int | None = os.dup(2)
        except OSError:
            # The rank runs without.
            self._stderr = None

    def say(self, rank: int, why: str) -> None:
        """Say why ``rank`` is killed; waits for nobody."""
        _log.warning("rank %d is killed: %s", rank, why)
        self._to_stderr(f"nvrx_slurm.inprocess: rank {rank} is killed: {why}\n".encode()[:_MOST_BYTES])
        self._to_agent(rank, why)

    def close(self) -> None:
        """Let go of standard error: whoever reads it waits for the end of all who have it."""
        fd, self._stderr = self._stderr, None
        if fd is not None:
            os.close(fd)

    def _to_stderr(self, text: bytes) -> None:
        if self._stderr is None:
            return
        # A reader that stands still must not stop the supervisor.
        with contextlib.suppress(OSError):
            if select.select([], [self._stderr], [], 0)[1]:
                os.write(self._stderr, text)

    @staticmethod
    def _to_agent(rank: int, why: str) -> None:
        if rank_channel.SOCKET_VARIABLE not in os.environ:
            return
        from nvrx_slurm.wire.rank_client import connect, one_line

        try:
            request = rank_channel.GivenUp(
                rank=rank, cycle=int(os.environ["TORCHELASTIC_RESTART_COUNT"]), why=one_line(why)
            )
            with connect() as channel:
                channel.send(rank_channel.encode_request(request), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except (KeyError, OSError, ValueError) as error:
            _log.warning("the journal does not hear of it: %r", error)
