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
TOKEN_VARIABLE = "NVRX_TOKEN"
COORDINATOR_VARIABLE = "NVRX_COORDINATOR"
FENCE_VARIABLE = "NVRX_FENCE"

KEEPALIVE_INTERVAL_MS = 1000
KEEPALIVE_TIMEOUT_MS = 3500
"""A peer that is silent for the sum of both is lost: 4.5 s. A peer whose kernel answers is lost at once."""

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    # A site's proxy settings are not for the job's own network.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Another server on this port would share our streams.
    ("grpc.so_reuseport", 0),
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
