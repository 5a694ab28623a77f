"""One agent of a job per node."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid

import pytest

from nvrx_slurm.agent import node_hold
from nvrx_slurm.agent.node_hold import NodeInUseError, hold_name, hold_node


@pytest.fixture
def name() -> str:
    return hold_name({"SLURM_JOB_ID": uuid.uuid4().hex}, "n1")


def test_a_second_agent_does_not_get_the_node(name: str) -> None:
    with hold_node(name, 1.0), pytest.raises(NodeInUseError, match="another agent of this job"):
        hold_node(name, 0.1)


def test_it_waits_for_the_first_and_hears_at_once_of_its_end(name: str) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = hold_node(name, 1.0)
        os.write(writing, b"x")
        threading.Event().wait(0.3)
        held.close()
        os._exit(0)
    os.read(reading, 1)
    began = time.monotonic()
    with hold_node(name, 20.0):
        assert time.monotonic() - began < 10.0
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_holds_it_too(name: str) -> None:
    reading, writing = os.pipe()
    held = hold_node(name, 1.0)
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    held.close()
    with pytest.raises(NodeInUseError):
        hold_node(name, 0.1)
    os.close(writing)
    hold_node(name, 20.0).close()
    os.waitpid(pid, 0)


def test_nodes_jobs_and_clusters_have_names_of_their_own() -> None:
    names = {
        hold_name({"SLURM_JOB_ID": job, "SLURM_CLUSTER_NAME": cluster}, node)
        for job in "12"
        for cluster in "ab"
        for node in ("n1", "n2")
    }
    assert len(names) == 8
    assert hold_name({}, "n" * 300).startswith("\0nvrx-agent-")
    hold_node(hold_name({"SLURM_JOB_ID": uuid.uuid4().hex}, "n" * 300), 1.0).close()


def test_a_name_that_another_user_has_taken_stops_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_node(name, 1.0):
        monkeypatch.setattr(node_hold.os, "geteuid", lambda: 12345)
        began = time.monotonic()
        hold_node(name, 20.0).close()
        assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("backlog", [None, 0], ids=["does not listen", "lets nobody in"])
def test_nor_does_one_who_cannot_be_asked_who_it_is(
    name: str, backlog: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as taken, socket.socket(socket.AF_UNIX) as waiting:
        taken.bind(name)
        if backlog is not None:
            taken.listen(backlog)
            waiting.connect(name)
        with pytest.raises(NodeInUseError):
            hold_node(name, 0.5)
        monkeypatch.setattr(node_hold.os, "geteuid", lambda: 12345)
        hold_node(name, 1.0).close()
