"""The ``RunHealthCheck`` call of a node's health daemon: gRPC over a Unix socket.

The contract is that of NVIDIA's extension, so that one daemon serves both::

    package nvhcd;
    service HealthCheckService { rpc RunHealthCheck (HealthCheckRequest) returns (HealthCheckResponse); }
    message HealthCheckRequest  { repeated string args = 1; }
    message HealthCheckResponse {
        bool success = 1; int32 exit_code = 2; string output = 3; string error = 4;
    }

Two messages of strings and numbers need no generated code: this is their wire format
(protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True)
class ServiceAnswer:
    """``HealthCheckResponse``."""

    success: bool = False
    exit_code: int = 0
    output: str = ""
    error: str = ""


def encode_request(args: Sequence[str]) -> bytes:
    """Return a ``HealthCheckRequest``."""
    return b"".join(b"\x0a" + _varint(len(data)) + data for data in (arg.encode() for arg in args))


def decode_request(data: bytes) -> list[str]:
    """Return its arguments.

    Raises:
        ValueError: not such a message.
    """
    return [_text(value) for number, value in _fields(data) if number == 1]


def encode_answer(answer: ServiceAnswer) -> bytes:
    """Return a ``HealthCheckResponse``."""
    parts = []
    for number, value in ((1, int(answer.success)), (2, answer.exit_code & (2**64 - 1))):
        if value:
            parts.append(_varint(number << 3) + _varint(value))
    for number, text in ((3, answer.output), (4, answer.error)):
        if text:
            data = text.encode()
            parts.append(_varint(number << 3 | _BYTES) + _varint(len(data)) + data)
    return b"".join(parts)


def decode_answer(data: bytes) -> ServiceAnswer:
    """Return what a ``HealthCheckResponse`` says; fields that we do not know are skipped.

    Raises:
        ValueError: not such a message.
    """
    success, exit_code, texts = False, 0, {3: "", 4: ""}
    for number, value in _fields(data):
        if number == 1:
            success = _number(value) != 0
        elif number == 2:
            raw = _number(value)
            exit_code = raw - 2**64 if raw >= 2**63 else raw
        elif number in texts:
            texts[number] = _text(value)
    return ServiceAnswer(success, exit_code, texts[3], texts[4])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MOST_VARINT_BYTES):
        if position >= len(data):
            raise ValueError("the message ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value & (2**64 - 1), position
    raise ValueError("a number is too long")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            number, position = _read_varint(data, position)
            yield tag >> 3, number
            continue
        if kind == _BYTES:
            length, position = _read_varint(data, position)
        elif kind in _FIXED_SIZES:
            length = _FIXED_SIZES[kind]
        else:
            raise ValueError(f"wire type {kind} is not known")
        if length > len(data) - position:
            raise ValueError("the message ends within a field")
        yield tag >> 3, data[position : position + length]
        position += length


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a number was expected")
    return value


def _text(value: int | bytes) -> str:
    if isinstance(value, int):
        raise ValueError("a text was expected")
    return value.decode()


def run_health_check(socket: str, args: Sequence[str], timeout_s: float) -> ServiceAnswer:
    """Ask the daemon.

    Raises:
        ConnectionError: nobody answers, or with something else; the message says what.
    """
    import grpc

    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call = channel.unary_unary(METHOD, request_serializer=encode_request, response_deserializer=bytes)
        try:
            return decode_answer(call(args, timeout=timeout_s))
        except grpc.RpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}"[:200]) from error
        except ValueError as error:
            raise ConnectionError(f"no HealthCheckResponse: {error}") from error
