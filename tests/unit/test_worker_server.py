"""What the worker server makes of its agent's end."""

from __future__ import annotations

import socket

from nvrx_slurm.agent.worker_server import WorkerServer


def test_an_agent_that_was_killed_before_it_had_read_everything_is_gone_like_any_other() -> None:
    ours, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        server = WorkerServer(ours, "")
        ours.send(b"a rank has ended")
        agents.close()
        assert server._receive() == (b"", [])
