"""A TCPStore that listens and keeps nothing."""

import socket


class TCPStore:
    def __init__(
        self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, master_listen_fd: int
    ) -> None:
        self._listener = socket.socket(fileno=master_listen_fd)
