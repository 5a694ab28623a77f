"""Who is not of the job can't disturb it, stop it, read its logs or feed it state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from harness import BIN, JOB_ID, RANK, LocalJob, local_jobs

from nvrx_slurm import journal
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc
from nvrx_slurm.wire.flight_recorder import short_address

WAITS = (
    RANK
    + """
write(f"environment{rank}", "\\n".join(os.environ))
wait_for("go_on")
print("all is well")
"""
)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalJob]:
    """A job that goes on until it has been disturbed in every way, and must then end well, with no fault."""
    with local_jobs(tmp_path_factory.mktemp("jobs")) as job:
        run = job(WAITS, "--warm-start", "off", nodes=2, ranks=1).start()
        run.wait_for_file("environment0")
        run.wait_for_file("environment1")
        yield run
        run.touch("go_on")
        assert run.wait() == 0
        assert run.events(journal.FaultDetected) == []
        assert run.events(journal.NodeExcluded) == []
        assert run.log("rank_0") == run.log("rank_1") == "all is well\n"
        assert run.nothing_is_left()


@pytest.fixture
def running(disturbed: LocalJob) -> Iterator[LocalJob]:
    """That job, which what a test does to it has not ended."""
    yield disturbed
    assert len(disturbed.ranks(0, 1)) == 2, disturbed.stderr
    assert disturbed.events(journal.FaultDetected) == disturbed.events(journal.NodeLost) == []


def secrets_of(run: LocalJob) -> dict[str, str]:
    """What an agent was started with; its owner can see it."""
    return {k: v for k, v in run.named("nvrx-agent", "n1").environ().items() if k.startswith("NVRX_")}


def converse(run: LocalJob, token: str | None, sent: Sequence[object], method: str = rpc.CONTROL) -> Any:
    """Open a stream, send messages, or bytes as they are; return all answers, or the status that ended it."""

    async def talk() -> Any:
        address = secrets_of(run)[rpc.COORDINATOR_VARIABLE]
        metadata = () if token is None else ((rpc.TOKEN_METADATA, token),)
        async with grpc.aio.insecure_channel(address, options=rpc.CLIENT_OPTIONS) as channel:
            call: Any = channel.stream_stream(
                f"/{rpc.SERVICE}/{method}",
                request_serializer=lambda m: m if isinstance(m, bytes) else rpc.encode(m),
            )(metadata=metadata)
            ended = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
            with contextlib.suppress(*ended):
                if rpc.GREETING in tuple(await call.initial_metadata()):
                    for message in sent:
                        await call.write(message)
                    await call.done_writing()
            answers = []
            with contextlib.suppress(*ended):
                while (answer := await call.read()) is not grpc.aio.EOF:
                    answers.append(rpc.decode_coordinator.decode(answer))
            return answers if await call.code() is grpc.StatusCode.OK else await call.code()

    return asyncio.run(asyncio.wait_for(talk(), 100))


def hello(run: LocalJob, **changes: object) -> msg.Hello:
    values = {"version": msg.PROTOCOL_VERSION, "node": "n2", "fence": secrets_of(run)[rpc.FENCE_VARIABLE]}
    return msg.Hello(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [None, "", "wrong"])
@pytest.mark.parametrize("method", [rpc.CONTROL, rpc.LOGS])
def test_who_has_not_the_token_is_not_listened_to(running: LocalJob, token: str | None, method: str) -> None:
    first = hello(running) if method == rpc.CONTROL else msg.LogChunk(cycle=0, rank=0, ts=0.0, data=b"evil")
    assert converse(running, token, [first], method) is grpc.StatusCode.UNAUTHENTICATED


def test_who_is_of_an_older_attempt_is_refused(running: LocalJob) -> None:
    token = secrets_of(running)[rpc.TOKEN_VARIABLE]
    (refused,) = converse(running, token, [hello(running, fence=f"{JOB_ID}.0.-1")])
    assert refused == msg.Refused(why=f"this is {JOB_ID}.0.0 (protocol 1), not {JOB_ID}.0.-1")


def test_who_speaks_another_protocol_is_refused(running: LocalJob) -> None:
    token = secrets_of(running)[rpc.TOKEN_VARIABLE]
    (refused,) = converse(running, token, [hello(running, version=99)])
    assert isinstance(refused, msg.Refused)


def test_a_node_of_another_job_is_turned_away(running: LocalJob) -> None:
    token = secrets_of(running)[rpc.TOKEN_VARIABLE]
    answers = converse(running, token, [hello(running, node="x9"), msg.Joined(slots=1)])
    assert [type(answer) for answer in answers[:2]] == [msg.Welcome, msg.Refused]


@pytest.mark.parametrize(
    "sent",
    [
        [b""],
        [b"\xff" * 1000],
        [b"\x93\xa5Hello\x01"],
        [msg.Joined(slots=1)],
        [msg.RankExited(cycle=0, rank=0, exit=1, after_stop=False)],
    ],
    ids=["nothing", "noise", "a torn message", "no Hello", "a lie"],
)
def test_who_has_the_token_but_talks_nonsense_is_cut_off(running: LocalJob, sent: list[object]) -> None:
    token = secrets_of(running)[rpc.TOKEN_VARIABLE]
    assert isinstance(converse(running, token, sent), grpc.StatusCode)


def test_log_messages_cannot_choose_where_they_are_written(running: LocalJob) -> None:
    token = secrets_of(running)[rpc.TOKEN_VARIABLE]
    converse(
        running,
        token,
        [
            msg.LogHello(node="../../evil"),
            msg.LogChunk(cycle=-1, rank=0, ts=0.0, data=b"evil\n"),
            msg.LogChunk(cycle=0, rank=-1, ts=float("nan"), data=b"evil\n"),
            b"\xff",
        ],
        rpc.LOGS,
    )
    assert not [path for path in running.root.parent.rglob("*") if "evil" in path.name]


def test_noise_on_the_port_does_not_disturb(running: LocalJob) -> None:
    host, _, port = secrets_of(running)[rpc.COORDINATOR_VARIABLE].rpartition(":")
    noise = random.Random(7)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for begin in (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        preface,
        preface + b"\x00\x00\x00\x04" + bytes(5),
    ):
        for size in (0, 1, 100, 100_000):
            connection = socket.create_connection((host, int(port)), timeout=250)
            with connection, contextlib.suppress(OSError):
                connection.sendall(begin + noise.randbytes(size))


def agent(run: LocalJob, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **secrets_of(run), "SLURMD_NODENAME": "n2", **changes}
    return subprocess.run(
        [str(BIN / "nvrx-agent")], env=environment, capture_output=True, text=True, check=False, timeout=240
    )


def test_an_agent_with_a_wrong_token_ends_and_says_so(running: LocalJob) -> None:
    done = agent(running, NVRX_TOKEN="wrong")
    assert done.returncode == 1
    assert "not an agent of this job" in done.stderr


def test_an_agent_of_an_older_attempt_ends_and_says_so(running: LocalJob) -> None:
    done = agent(running, NVRX_FENCE=f"{JOB_ID}.0.-1")
    assert done.returncode == 3
    assert f"this is {JOB_ID}.0.0" in done.stderr


def test_an_agent_whose_coordinator_is_gone_ends_and_says_so(running: LocalJob) -> None:
    done = agent(running, NVRX_COORDINATOR="127.0.0.1:1")
    assert done.returncode == 1
    assert "the Coordinator at 127.0.0.1:1" in done.stderr
    assert "Connection refused" in done.stderr


def test_ranks_do_not_have_the_token(running: LocalJob) -> None:
    for rank in (0, 1):
        names = running.wait_for_file(f"environment{rank}").splitlines()
        assert rpc.TOKEN_VARIABLE not in names
        assert rpc.COORDINATOR_VARIABLE not in names


def test_the_token_is_in_no_file_and_on_no_command_line(running: LocalJob) -> None:
    token = secrets_of(running)[rpc.TOKEN_VARIABLE]
    for path in running.root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # one whose place another takes
            assert not path.is_file() or token.encode() not in path.read_bytes(), path
    for process in running.processes():
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile
            assert token not in " ".join(process.cmdline())


def test_noise_on_the_ranks_socket_does_not_disturb(running: LocalJob) -> None:
    path = running.private_dir_of("n1") / "ranks.sock"
    for packet in (b"{}", b"\xff" * 60_000, b'{"type":"MonitoringStarted","rank":99,"cycle":0}', b"[" * 5000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            with short_address(path) as address:
                connection.connect(address)
            connection.sendall(packet)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try it as somebody else")
def test_another_user_reaches_neither_the_socket_nor_the_files(running: LocalJob) -> None:
    private = running.private_dir_of("n1")
    attempt = f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def refused(call):
    try:
        call()
    except PermissionError:
        return True
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
# By its name alone: the whole path may be longer than a socket's address.
assert refused(lambda: (os.chdir("{private}"), connection.connect("ranks.sock")))
assert refused(lambda: os.listdir("{private}"))
assert refused(lambda: os.listdir("{running.run_dir}"))
assert refused(lambda: open("{running.run_dir}/journal.jsonl"))
assert refused(lambda: open("/proc/{running.named("nvrx-agent", "n1").pid}/environ").read())
"""
    subprocess.run([sys.executable, "-c", attempt], check=True, timeout=240)
