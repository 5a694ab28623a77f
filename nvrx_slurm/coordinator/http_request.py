"""One HTTP request to a service of the site, in bounded time and memory. No redirect is followed."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from urllib.parse import urlsplit

MAX_ANSWER = 1024 * 1024


class HttpError(Exception):
    """There is no answer that can be used; the message says why."""


async def request(method: str, url: str, body: bytes | None, timeout_s: float) -> bytes:
    """Return the body of the answer, which must have a status of 200 to 299.

    Args:
        url: http or https; the server's certificate must be valid.
        body: JSON; None: none.

    Raises:
        HttpError
    """
    try:
        return await asyncio.wait_for(_request(method, url, body), timeout_s)
    except asyncio.TimeoutError:
        raise HttpError(f"no answer within {timeout_s:g} s") from None
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise HttpError(str(error) or type(error).__name__) from error


async def _request(method: str, url: str, body: bytes | None) -> bytes:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    context = ssl.create_default_context() if secure else None
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=context
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = [f"{method} {target} HTTP/1.0", f"Host: {parts.netloc}", "Accept: application/json"]
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        # The answer to a request of HTTP/1.0 says how long it is, or ends with its connection (RFC 9112, 6).
        lengths = [int(line[15:]) for line in lines if line.startswith("content-length:")]
        answer = await _read(reader, min([*lengths, MAX_ANSWER + 1]))
        status = lines[0].split(" ", 2)[1:2]
        if len(answer) > MAX_ANSWER:
            raise HttpError(f"the answer is longer than {MAX_ANSWER >> 20} MiB")
        if not (status and len(status[0]) == 3 and status[0].startswith("2")):
            raise HttpError(f"it answers {lines[0][:80]!r}")
        return answer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    """Return what comes until the end, but no more than ``most``."""
    data = bytearray()
    while len(data) < most and (block := await reader.read(min(65536, most - len(data)))):
        data += block
    return bytes(data)
