"""What one barrier of very many ranks costs the hub: all of them are connections of this process."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from bench import document, ending
from bench.document import OURS, Row
from nvrx_slurm.supervisor import messages as msg

_SIZES = (1024, 16_384)
_TOKEN = "of this benchmark"
_SPARE_FILES = 256
_HUB = """
import selectors, sys, time
from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.hub_server import HubServer

selector = selectors.DefaultSelector()
server = HubServer(selector, msg.Host(sys.argv[1], int(sys.argv[2])), 600.0)
print(server.port, flush=True)
while server.is_needed:
    for key, _ in selector.select(1.0):
        key.data()
"""


class HubBenchmarkError(RuntimeError):
    """The hub did not do what it should; the message is one sentence."""


def rows(say: Callable[[str], None], sizes: Sequence[int] = _SIZES, repetitions: int = 5) -> Iterator[Row]:
    """Yield how long a fault takes to reach all, and all take through the barrier."""
    for size in sizes:
        limit = size + _SPARE_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < limit:
            say(f"barrier of {size} ranks: left out, only {hard} files may be open")
            continue
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
        say(f"barrier of {size} ranks …")
        with _members(size) as members:
            measured = [members.iterate(iteration) for iteration in range(repetitions)]
        for metric, values in zip(
            ("fault reaches all", "through the barrier"), zip(*measured, strict=True), strict=True
        ):
            yield document.summarize("barrier", OURS, f"{metric}, {size} ranks", "ms", values)


class _Members:
    """All ranks of a job."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._poll = select.epoll()
        self._readers = {each.fileno(): msg.FrameReader[msg.Message](msg.FromHub) for each in sockets}
        self._by_number = {each.fileno(): each for each in sockets}
        for each in sockets:
            self._poll.register(each, select.EPOLLIN)

    def join(self) -> None:
        for number, each in enumerate(self._sockets):
            each.sendall(msg.frame(msg.Join(_TOKEN, number, len(self._sockets))))
        self._await(msg.Joined)

    def iterate(self, iteration: int) -> tuple[float, float]:
        """Return the milliseconds until all know of a fault, and until all are through the barrier."""
        size = len(self._sockets)
        for number, each in enumerate(self._sockets):
            each.sendall(msg.frame(msg.Enter(iteration, number, size)))
        began = time.perf_counter()
        self._sockets[size // 2].sendall(msg.frame(msg.Fault(iteration, "EXCEPTION", "on purpose")))
        self._await(msg.Interrupt)
        known = time.perf_counter()
        arrive = msg.frame(msg.Arrive(iteration))
        for each in self._sockets:
            each.sendall(arrive)
        self._await(msg.Release)
        return (known - began) * 1e3, (time.perf_counter() - known) * 1e3

    def _await(self, kind: type[msg.Message]) -> None:
        """Read until every member has been sent one of ``kind``."""
        missing = set(self._readers)
        while missing:
            ready = self._poll.poll(60.0)
            if not ready:
                raise HubBenchmarkError(f"{len(missing)} members were not sent {kind.__name__} within 60 s")
            for number, _ in ready:
                data = self._by_number[number].recv(1 << 16)
                if not data:
                    raise HubBenchmarkError(f"the hub ended a connection before {kind.__name__}")
                if any(isinstance(message, kind) for message in self._readers[number].feed(data)):
                    missing.discard(number)


@contextlib.contextmanager
def _members(size: int) -> Iterator[_Members]:
    argv = [sys.executable, "-c", _HUB, _TOKEN, str(size)]
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(ending.program(argv, stdout=subprocess.PIPE))
        assert hub.stdout is not None
        port = int(hub.stdout.readline())
        sockets = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60.0)) for _ in range(size)
        ]
        members = _Members(sockets)
        members.join()
        yield members
