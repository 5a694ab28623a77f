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
_WORD = struct.Struct("P")


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
    for descriptor, inode in _gloo_connections():
        with contextlib.suppress(OSError):
            own = os.dup(descriptor)
            with socket.socket(fileno=own) as connection:
                # It may have been closed and its number given to another file meanwhile.
                if os.fstat(own).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _gloo_connections() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _log.warning("gloo collectives can't be interrupted: /proc/self/mem: %s", error.strerror)
        return
    try:
        for descriptor, data, inode in _registered():
            if _serves_a_connection(memory, data):
                yield descriptor, inode
    finally:
        os.close(memory)


def _registered() -> Iterator[tuple[int, int, int]]:
    """Yield what any epoll descriptor of this process watches: descriptor, data, inode."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                text = file.read()
        except OSError:  # closed meanwhile
            continue
        for descriptor, data, inode in _TARGET.findall(text):
            yield int(descriptor), int(data, 16), int(inode, 16)


def _serves_a_connection(memory: int, address: int) -> bool:
    """Tell whether an object of gloo's class is at ``address``, which may as well be no address at all."""
    try:
        word = os.pread(memory, _WORD.size, address)
    except (OSError, OverflowError):
        return False
    return len(word) == _WORD.size and _names_a_connection(_WORD.unpack(word)[0])


@cache
def _names_a_connection(table: int) -> bool:
    info = _SymbolInfo()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(table), ctypes.byref(info)):
        return False
    return info.symbol is not None and _CONNECTION.fullmatch(info.symbol) is not None
