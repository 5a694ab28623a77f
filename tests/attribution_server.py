"""A fake attribution service with NVIDIA's /logs: real HTTP on a free port of this machine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = Callable[["Server"], tuple[int, bytes]]


def says(**document: Any) -> Answer:
    return lambda _server: (200, json.dumps(document).encode())


def recommends(action: str, **more: Any) -> Answer:
    return says(status="completed", recommendation={"action": action, **more})


@dataclass
class Server:
    """What it was told and asked; ``answer`` is called for every GET."""

    answer: Answer
    port: int = 0
    posted: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    post_status: int = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(answer: Answer, post_status: int = 200) -> Iterator[Server]:
    server = Server(answer, post_status=post_status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/logs"
            server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.reply(server.post_status, b"{}")

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            assert parts.path == "/logs"
            server.asked.append(parse_qs(parts.query))
            self.reply(*server.answer(server))

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
