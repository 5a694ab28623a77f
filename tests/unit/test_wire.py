"""What crosses a process boundary: typed messages, the token, and the ranks' requests."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.pace import KernelLoss, StragglerVerdict
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rank_channel, rpc
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts

FROM_AGENT: list[msg.AgentMessage] = [
    msg.Hello(version=1, node="n1", fence="7.0.0"),
    msg.Joined(slots=2),
    msg.WorkersStarted(cycle=1, ranks=[0, 1], pids=[10, 11], warm=True, why_cold=""),
    msg.StartFailed(cycle=1, why="no space"),
    msg.RankExited(cycle=1, rank=3, exit=-9, after_stop=False),
    msg.Snapshots(
        cycle=1,
        snapshots=[
            msg.RankSnapshot(rank=0, heartbeats=4, age_s=0.5, process_state="S", monitored=True),
        ],
    ),
    msg.RanksReady(cycle=1),
    msg.RanksStepping(cycle=1, step=None),
    msg.WorkersGone(cycle=1),
    msg.Leaving(why="SIGTERM", by_signal=True),
]
TO_AGENT: list[msg.CoordinatorMessage] = [
    msg.Refused(why="too old"),
    msg.StartWorkers(
        cycle=1,
        group_rank=0,
        group_world_size=2,
        first_rank=0,
        world_size=4,
        master_addr="10.0.0.1",
        master_port=29500,
        monitoring=Monitoring(heartbeat=HeartbeatTimeouts(), section=SectionTimeouts()),
    ),
    msg.StopWorkers(cycle=1, hung=[3]),
    msg.Probe(cycle=1),
    msg.AskToStop(cycle=1),
    msg.Shutdown(),
]
LOGS: list[msg.LogMessage] = [
    msg.LogHello(node="n1"),
    msg.LogChunk(cycle=0, rank=1, ts=1.5, data=b"\xff\n"),
    msg.LogEnd(cycle=0, rank=1),
]


@pytest.mark.parametrize(
    ("decoder", "messages"),
    [(rpc.decode_agent, FROM_AGENT), (rpc.decode_coordinator, TO_AGENT), (rpc.decode_log, LOGS)],
)
def test_messages_survive_the_wire(decoder: msgspec.msgpack.Decoder[object], messages: list[object]) -> None:
    for message in messages:
        assert decoder.decode(rpc.encode(message)) == message


@pytest.mark.parametrize("decoder", [rpc.decode_agent, rpc.decode_coordinator, rpc.decode_log])
def test_a_message_of_the_other_direction_or_of_wrong_type_is_refused(
    decoder: msgspec.msgpack.Decoder[object],
) -> None:
    own = {rpc.decode_agent: FROM_AGENT, rpc.decode_coordinator: TO_AGENT, rpc.decode_log: LOGS}[decoder]
    others = [message for message in (*FROM_AGENT, *TO_AGENT, *LOGS) if message not in own]
    for data in [rpc.encode(message) for message in others] + [
        b"",
        b"\xc0",
        msgspec.msgpack.encode(["RankExited", "one", 3, 1, False, ""]),
        msgspec.msgpack.encode(["LogChunk", 0, 0, 0.0, 5]),
        msgspec.msgpack.encode(["Nonsense"]),
        msgspec.msgpack.encode({"type": "Hello"}),
    ]:
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(data)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for decoder in (rpc.decode_agent, rpc.decode_coordinator, rpc.decode_log):
        try:
            message = decoder.decode(data)
        except msgspec.DecodeError:
            continue
        assert decoder.decode(rpc.encode(message)) == message


# --- the token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "matches"),
    [
        ([("nvrx-token", "secret")], True),
        ([("user-agent", "grpc"), ("nvrx-token", b"secret")], True),
        ([("nvrx-token", "secret ")], False),
        ([("nvrx-token", "Secret")], False),
        ([("nvrx-token", "")], False),
        ([("nvrx-token", "ü")], False),
        ([("nvrx-token", b"\xff")], False),
        ([("token", "secret")], False),
        ([("nvrx-token", "wrong"), ("nvrx-token", "secret")], False),
        ([], False),
    ],
)
def test_only_the_jobs_own_token_opens(metadata: list[tuple[str, str | bytes]], matches: bool) -> None:
    assert rpc.token_matches(metadata, "secret") is matches


def test_tokens_are_long_and_differ() -> None:
    tokens = {rpc.new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) >= 43 and token.isascii() for token in tokens)


def test_a_silent_peer_is_lost_in_the_time_that_is_promised() -> None:
    """gRPC has three clocks for this; the sum of interval and answer must stay below 5 s for a node."""
    for options, limit_s in ((dict(rpc.SERVER_OPTIONS), 5.0), (dict(rpc.CLIENT_OPTIONS), 10.0)):
        interval, timeout = options["grpc.keepalive_time_ms"], options["grpc.keepalive_timeout_ms"]
        assert options["grpc.http2.ping_timeout_ms"] == timeout
        assert (interval + timeout) / 1000 < limit_s


# --- ranks' requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        rank_channel.MonitoringStarted(rank=1, cycle=0),
        rank_channel.FirstHeartbeat(rank=1, cycle=0),
        rank_channel.Straggler(
            rank=1,
            cycle=2,
            verdict=StragglerVerdict(
                rank=5,
                node="",
                section="step",
                score=0.5,
                lost_ms=3.5,
                reports=2,
                of_reports=3,
                kernels=[KernelLoss(kernel="gemm", lost_ms=2.5)],
            ),
        ),
        rank_channel.Checkpoint(
            rank=1, cycle=0, what=rank_channel.CheckpointEvent.SAVED, step=5, layer="shared"
        ),
    ],
)
def test_a_ranks_request_survives_its_datagram(request_: rank_channel.RankRequest) -> None:
    data = rank_channel.encode_request(request_)
    assert len(data) < rank_channel.MAX_REQUEST_BYTES
    assert rank_channel.decode_request.decode(data) == request_


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b'{"type":"Exclude","rank":1,"cycle":0}',
        b'{"type":"FirstHeartbeat","rank":"1","cycle":0}',
        b'{"type":"Checkpoint","rank":1,"cycle":0,"what":"eaten","step":1,"layer":"x"}',
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        rank_channel.decode_request.decode(data)
