"""The gRPC service between Coordinator and agents: method names, codecs, options, and the job's token."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from nvrx_slurm.wire.messages import AgentMessage, CoordinatorMessage, LogMessage

SERVICE = "nvrx.Coordinator"
CONTROL = "Control"
"""Bidirectional, one per agent: :data:`AgentMessage` up, :data:`CoordinatorMessage` down."""
LOGS = "Logs"
"""Client stream beside it, so that output never delays control: :data:`LogMessage` up."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
TOKEN_METADATA = "nvrx-token"
GREETING = ("nvrx-listens", "yes")
"""Initial metadata of the Coordinator. An agent says nothing before: if it were still writing while it is
turned away, gRPC would tell it of an internal error instead of the reason."""
TOKEN_VARIABLE = "NVRX_TOKEN"
COORDINATOR_VARIABLE = "NVRX_COORDINATOR"
FENCE_VARIABLE = "NVRX_FENCE"

NODE_SILENCE_MS = (2000, 2500)
"""Keep-alive of the Coordinator, interval and time-out: a node that is silent for the sum of both, 4.5 s, is
lost. A node whose kernel answers is lost at once. Shorter intervals would load a large job's Coordinator."""
COORDINATOR_SILENCE_MS = (5000, 3500)
"""The same of an agent: a node that is cut off kills its ranks after 8.5 s."""

STRANGER_SILENCE_MS = 15_000
"""For so long a connection may do nothing; thousands of agents that come at once take turns for seconds."""


def _keepalive(interval_and_timeout: tuple[int, int]) -> list[tuple[str, Any]]:
    interval, timeout = interval_and_timeout
    return [
        ("grpc.keepalive_time_ms", interval),
        ("grpc.keepalive_timeout_ms", timeout),
        # The time-out above became one of TCP alone (seen with grpcio 1.85): a process that is stopped goes
        # unnoticed, for the kernel acknowledges. This one is for the ping's answer; a minute by default.
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]


CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_keepalive(COORDINATOR_SILENCE_MS),
    # A site's proxy settings are not for the job's own network.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_keepalive(NODE_SILENCE_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", COORDINATOR_SILENCE_MS[0] // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Another server on this port would share our streams.
    ("grpc.so_reuseport", 0),
    # Who connects and is no agent must not keep a descriptor: agents say at once who they are, and always
    # have a stream open.
    ("grpc.server_handshake_timeout_ms", STRANGER_SILENCE_MS),
    ("grpc.max_connection_idle_ms", STRANGER_SILENCE_MS),
    # Above the default of 1,000, streams beyond it come back CANCELLED when all nodes join at once.
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
]

encode = msgspec.msgpack.Encoder().encode
decode_agent: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
decode_coordinator: msgspec.msgpack.Decoder[CoordinatorMessage] = msgspec.msgpack.Decoder(CoordinatorMessage)
decode_log: msgspec.msgpack.Decoder[LogMessage] = msgspec.msgpack.Decoder(LogMessage)


def new_token() -> str:
    """Return a secret for one job."""
    return secrets.token_urlsafe(32)


def token_matches(metadata: Iterable[tuple[str, str | bytes]], token: str) -> bool:
    """Tell whether a call carries ``token``; takes the same time whatever was sent."""
    sent = next((value for key, value in metadata if key == TOKEN_METADATA), "")
    if isinstance(sent, str):
        sent = sent.encode()
    return hmac.compare_digest(sent, token.encode())
