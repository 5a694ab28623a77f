"""Stores: the one by which ranks find each other, and the hub's, which plug-ins and functions may use.

``Wrapper(store_factory=…, store_kwargs=…)`` names the first. It is needed for a moment only: rank 0 writes
where the hub of the call is, the others read it. From then on nothing depends on it, so it may go with rank
0's process. :class:`HubStore` is kept by the hub.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nvrx_slurm import linux
from nvrx_slurm.inprocess.exception import InternalError, RestartError
from nvrx_slurm.supervisor import messages as msg

_TIMEOUT = timedelta(seconds=300)


class BarrierError(RestartError):
    """A barrier did not come about."""


class BarrierTimeout(BarrierError):
    """Not all came in time."""


class BarrierOverflow(BarrierError):
    """More came than were expected."""


class StoreMixin:
    """What rank assignment needs beyond torch's own store; derive a store from both."""

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Initial ranks that the store depends on: none, once ranks have found each other."""
        return ()

    def barrier(self, group_name: str, rendezvous_count: int, timeout: timedelta = _TIMEOUT) -> None:
        """Wait until ``rendezvous_count`` callers have come; a name is for one use.

        Raises:
            BarrierTimeout: they did not come within ``timeout``.
            BarrierOverflow: more came.
        """
        store: Any = self
        arrived = store.add(f"{group_name}/arrived", 1)
        if arrived > rendezvous_count:
            raise BarrierOverflow(f"barrier {group_name}: {arrived} came, {rendezvous_count} were expected")
        if arrived == rendezvous_count:
            store.set(f"{group_name}/complete", "1")
            return
        try:
            store.wait([f"{group_name}/complete"], timeout)
        except (dist.DistStoreError, RuntimeError) as error:
            seconds = timeout.total_seconds()
            raise BarrierTimeout(
                f"barrier {group_name}: not all of {rendezvous_count} came within {seconds:g} s"
            ) from error


class TCPStore(dist.TCPStore, StoreMixin):  # type: ignore[misc]
    """torch's TCPStore, which rank 0 serves unless the launcher does already.

    Args:
        host_name: default: MASTER_ADDR.
        port: default: MASTER_PORT.
        world_size: default: WORLD_SIZE.
        timeout: of each operation.
        wait_for_workers: have rank 0 wait until all have come; not where the launcher serves.
        multi_tenant: as torch has it.
        use_libuv: as torch has it.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = _TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        host = os.environ.get("MASTER_ADDR", "localhost") if host_name is None else host_name
        own_port = int(os.environ.get("MASTER_PORT", "0")) if port is None else port
        size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        settings = {"timeout": timeout, "multi_tenant": multi_tenant, "use_libuv": use_libuv}
        served = _is_served_by_launcher(own_port)
        if os.environ.get("RANK", "0") == "0" and not served:
            try:
                super().__init__(host, own_port, size, True, wait_for_workers=wait_for_workers, **settings)
                return
            except dist.DistNetworkError as error:
                # Somebody else serves there; anything else a client will find out, too.
                if "EADDRINUSE" not in str(error):
                    raise
                owner = linux.listening_user(own_port)
                if owner not in (None, os.geteuid()):
                    raise InternalError(
                        f"port {own_port} of this host belongs to user {owner}: set MASTER_PORT to a free one"
                    ) from error
                served = True
        super().__init__(
            host, own_port, size, False, wait_for_workers=wait_for_workers and not served, **settings
        )


class FileStore(dist.FileStore, StoreMixin):  # type: ignore[misc]
    """torch's FileStore; its file must be new with every job."""


class PrefixStore(dist.PrefixStore, StoreMixin):  # type: ignore[misc]
    """A part of another store.

    Args:
        prefix: of the keys; an iteration's number, mostly.
        store: where they are.
    """

    def __init__(self, prefix: str | int, store: dist.Store) -> None:
        super().__init__(f"_inprocess_{prefix}", store)


def _is_served_by_launcher(port: int) -> bool:
    """Tell whether torchrun or nvrx-srun serve a store on ``port``."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and str(port) == os.environ.get(
        "MASTER_PORT"
    )


class HubStore(dist.Store, StoreMixin):  # type: ignore[misc]
    """The key-value store of a call's hub, with a part of it for these keys.

    Any thread may use it, and one that waits holds up no other: each operation has a connection of its own.
    It is good for ``torch.distributed.init_process_group(store=…)``, too.

    Args:
        addresses: where the hub may be reached.
        token: what it asks for.
        prefix: put before every key.
        timeout: of each operation.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        prefix: str = "",
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        super().__init__()
        self._pool = _Pool(addresses, token)
        self._prefix = prefix
        self._limit = timeout
        self.was_used = False
        """Whether this object was asked for anything."""

    def part(self, prefix: str) -> HubStore:
        """Return the same store for keys of their own."""
        other = HubStore([], "", f"{self._prefix}{prefix}/", self._limit)
        other._pool = self._pool
        return other

    def close(self) -> None:
        """Close its connections."""
        self._pool.close()

    def interrupt(self) -> None:
        """Have all operations that are under way end with an error."""
        self._pool.interrupt()

    def delete_all(self) -> None:
        """Delete the keys of this part."""
        self._ask("delete_prefix", [""])

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [value])

    def get(self, key: str) -> bytes:
        """Wait for the key."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for the keys."""
        self.wait(keys)
        return list(self._ask("get", keys).values)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", keys, values)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).number

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", [key], [value])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask("compare_set", [key], [expected_value, desired_value]).values[0]

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).number)

    def num_keys(self) -> int:
        return self._ask("count", []).number

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            torch.distributed.DistStoreError: they are not within the time-out.
        """
        self._ask("wait", keys, timeout=timeout)

    def _ask(
        self,
        operation: str,
        keys: Sequence[str],
        values: Sequence[str | bytes] = (),
        amount: int = 0,
        timeout: timedelta | None = None,
    ) -> msg.StoreReply:
        self.was_used = True
        request = msg.StoreRequest(
            operation,
            tuple(self._prefix + key for key in keys),
            tuple(value.encode() if isinstance(value, str) else bytes(value) for value in values),
            amount,
        )
        reply = self._pool.ask(request, (timeout or self._limit).total_seconds())
        if reply.error:
            raise dist.DistStoreError(f"the hub's store: {reply.error}")
        return reply


class _Pool:
    """Connections to a hub's store that nobody uses at the moment."""

    def __init__(self, addresses: Sequence[tuple[str, int]], token: str) -> None:
        self._addresses = list(addresses)
        self._token = token
        self._free: list[socket.socket] = []
        self._used: set[socket.socket] = set()
        self._lock = threading.Lock()

    def ask(self, request: msg.StoreRequest, timeout_s: float) -> msg.StoreReply:
        deadline = time.monotonic() + timeout_s
        connection = self._take(timeout_s)
        is_whole = False
        try:
            connection.sendall(msg.frame(request))
            reply = _receive(connection, deadline)
            is_whole = True
        except TimeoutError:
            raise dist.DistStoreError(
                f"the hub's store: {request.operation} of {', '.join(request.keys)} took longer than "
                f"{timeout_s:g} s"
            ) from None
        except OSError as error:
            raise dist.DistNetworkError(f"the hub's store can't be reached: {error}") from error
        finally:
            with self._lock:
                is_whole = is_whole and connection in self._used
                self._used.discard(connection)
                if is_whole:
                    self._free.append(connection)
            # One that still owes a reply, whatever interrupted us, is of no use to the next.
            if not is_whole:
                connection.close()
        return reply

    def interrupt(self) -> None:
        with self._lock:
            for connection in self._used:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._used.clear()

    def _take(self, timeout_s: float) -> socket.socket:
        with self._lock:
            if self._free:
                connection = self._free.pop()
                self._used.add(connection)
                return connection
        refusals = []
        for address in self._addresses:
            try:
                connection = socket.create_connection(address, timeout=timeout_s)
            except OSError as error:
                refusals.append(f"{address[0]}:{address[1]} {error.strerror or error}")
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(msg.frame(msg.StoreJoin(self._token)))
            with self._lock:
                self._used.add(connection)
            # The working one first, the next time.
            self._addresses.remove(address)
            self._addresses.insert(0, address)
            return connection
        raise dist.DistNetworkError("the hub's store can't be reached: " + ", ".join(refusals))

    def close(self) -> None:
        with self._lock:
            for connection in self._free:
                connection.close()
            self._free.clear()


def _receive(connection: socket.socket, deadline: float) -> msg.StoreReply:
    reader: msg.FrameReader[msg.StoreReply] = msg.FrameReader(msg.StoreReply)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        data = connection.recv(256 * 1024)
        if not data:
            raise ConnectionResetError("the hub closed the connection")
        for reply in reader.feed(data):
            return reply
