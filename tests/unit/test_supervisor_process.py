"""The process beside a rank: what becomes of it when the rank ends early, or asks for files that can't be."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest

from nvrx_slurm.interpreter import command_for
from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.page import ProgressPage
from nvrx_slurm.supervisor.process import Settings


class Rank:
    """A process that waits, with a supervisor."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.channel, self._theirs = socket.socketpair()
        self.channel.settimeout(60)
        self._page = ProgressPage()

    def supervise(self, stderr: int | IO[str] = subprocess.DEVNULL, **settings: str) -> None:
        """Start the supervisor; its first process ends when the real one is there, which keeps ``stderr``."""
        fds = (self._theirs.fileno(), self._page.fd)
        given = Settings(
            member=0,
            soft_timeout_s=60,
            hard_timeout_s=90,
            heartbeat_interval_s=1,
            heartbeat_timeout_s=30,
            termination_grace_s=5,
            rank_pid=self.process.pid,
            channel_fd=fds[0],
            page_fd=fds[1],
            **settings,
        )
        subprocess.run(
            command_for("nvrx_slurm.supervisor.process", msgspec.json.encode(given).decode()),
            pass_fds=fds,
            stderr=stderr,
            timeout=250,
        )
        self._theirs.close()

    def receive(self) -> bytes:
        size = struct.unpack("<I", self.channel.recv(4, socket.MSG_WAITALL))[0]
        return self.channel.recv(size, socket.MSG_WAITALL)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.channel.close()
        self._theirs.close()
        self._page.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.end()


def test_the_supervisor_of_a_rank_that_ends_before_anybody_has_joined_ends_too(rank: Rank) -> None:
    rank.supervise()
    rank.channel.sendall(msg.frame(msg.Host("token", 2)))
    assert b"Hosting" in rank.receive()
    rank.process.send_signal(signal.SIGKILL)
    rank.process.wait()
    while rank.channel.recv(4096):  # its end of the channel is open as long as it lives
        pass


@pytest.mark.parametrize("name", ["logfile", "pidfile"])
def test_a_file_that_can_not_be_written_is_said_on_standard_error(
    rank: Rank, tmp_path: Path, name: str
) -> None:
    with open(tmp_path / "stderr", "w+") as stderr:
        rank.supervise(stderr, **{name: str(tmp_path / "none" / "file")})
        assert rank.channel.recv(1) == b"", "it has ended"
        stderr.seek(0)
        said = stderr.read()
    assert said.startswith(f"nvrx_slurm.inprocess: monitor_process_{name} can't be written: ")
    assert said.count("\n") == 1
