"""The connections of this process's gloo groups, told for certain from all its other sockets.

torch can't abort a gloo collective: one that waits for a rank that will not come waits until the group's
time-out. Shutting its connections down ends it in milliseconds, here and, as they see the end of the stream,
on the other ranks.

gloo's event loop registers every connection with its epoll descriptor, and the object that serves the
connection as the event's data. The kernel shows both in /proc/self/fdinfo; the first word of such an object
is the address of its class's table of virtual functions, and the dynamic linker knows the name of that. So
stores, gRPC and what the user has open are never taken for gloo's. (gloo/transport/tcp/loop.cc, proc(5),
Itanium C++ ABI 2.5.2.)
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import socket
import struct
from collections.abc import Iterator
from functools import cache

_log = logging.getLogger(__name__)
_TARGET = re.compile(
    r"tfd:\s*(\d+)\s+events:\s*\w+\s+data:\s*([0-9a-f]+)\s+pos:\s*-?\w+\s+ino:\s*([0-9a-f]+)"
)
_CONNECTION = re.compile(rb"_ZTVN4gloo9transport\w*4PairE")
"""Tables of the classes ``gloo::transport::tcp::Pair`` and ``gloo::transport::tcp::tls::Pair``."""
_LISTENER = re.compile(rb"_ZTVN4gloo9transport\w*8ListenerE")
"""Table of ``gloo::transport::tcp::Listener``."""
_WORD = struct.Struct("P")
_SEQUENCE = struct.Struct("q")
_MOST_AWAITED = 4096
"""Connections made to one listener."""


class _SymbolInfo(ctypes.Structure):
    """``Dl_info``."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def shut_gloo_connections() -> int:
    """Shut down every connection of every gloo group of this process; return how many they were.

    Whatever waits on them, in any thread, fails at once; the groups are of no use any more.
    """
    count = 0
    for descriptor, inode in _gloo_sockets(_CONNECTION):
        with contextlib.suppress(OSError):
            own = os.dup(descriptor)
            with socket.socket(fileno=own) as connection:
                # It may have been closed and its number given to another file meanwhile.
                if os.fstat(own).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def answer_gloo_listeners(world_size: int) -> int:
    """Give every gloo group that is being made the connections that it waits for; return how many.

    A rank waits at its listener for those of other ranks, without any socket that could be shut down, until
    the group's time-out. Whoever connects says by a number which one he is: they count from 0 in each
    listener (gloo/transport/tcp/listener.cc). Ours end at once, and so does the making of the group.
    """
    count = 0
    for descriptor, _ in _gloo_sockets(_LISTENER):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            address, family = listener.getsockname(), listener.family
            for number in range(min(world_size, _MOST_AWAITED)):
                with socket.socket(family, socket.SOCK_STREAM) as connection:
                    connection.settimeout(0.1)
                    connection.connect(address)
                    connection.sendall(_SEQUENCE.pack(number))
                    count += 1
    return count


def _gloo_sockets(kind: re.Pattern[bytes]) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each that an object of such a class serves."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _log.warning("gloo collectives can't be interrupted: /proc/self/mem: %s", error.strerror)
        return
    try:
        for descriptor, data, inode in _registered():
            if _is_served_by(memory, data, kind):
                yield descriptor, inode
    finally:
        os.close(memory)


def _registered() -> Iterator[tuple[int, int, int]]:
    """Yield what any epoll descriptor of this process watches: descriptor, data, inode."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError as error:
        _log.warning("gloo collectives can't be interrupted: /proc/self/fd: %s", error.strerror)
        return
    for name in names:
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                text = file.read()
        except OSError:  # closed meanwhile
            continue
        for descriptor, data, inode in _TARGET.findall(text):
            yield int(descriptor), int(data, 16), int(inode, 16)


def _is_served_by(memory: int, address: int, kind: re.Pattern[bytes]) -> bool:
    """Tell whether an object of such a class is at ``address``, which may as well be no address at all."""
    try:
        word = os.pread(memory, _WORD.size, address)
    except (OSError, OverflowError):
        return False
    return len(word) == _WORD.size and kind.fullmatch(_table_name(_WORD.unpack(word)[0])) is not None


@cache
def _table_name(table: int) -> bytes:
    info = _SymbolInfo()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(table), ctypes.byref(info)):
        return b""
    return info.symbol or b""
