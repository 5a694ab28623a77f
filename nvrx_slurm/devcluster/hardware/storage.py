"""Storage that hangs, for real: a file system in ``/storage`` whose server takes requests and never answers.

Run as a script inside of a node, by file name and on the standard library alone::

    storage.py hang|stale|io_error MOUNT_POINT
    storage.py ok MOUNT_POINT

It mounts a FUSE file system over the mount point and serves it, from the background, through ``/dev/fuse``
itself (linux/fuse.h, protocol 7.31). Whoever waits for a request that the server has read and not answered
can't be killed: such processes are in state D, as with a dead file server. ``ok`` aborts the connection,
which ends these waits with an error, and unmounts.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import struct
import sys

MOUNT_POINT = "/storage"
_DEVICE = "/dev/fuse"
_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_FORCE, _MNT_DETACH = 1, 2
_IN_HEADER = struct.Struct("=IIQQIIII")
_OUT_HEADER = struct.Struct("=IiQ")
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
_FORGET, _INIT, _INTERRUPT, _BATCH_FORGET = 2, 26, 36, 42
_NO_ANSWER = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_LARGEST_REQUEST = 1 << 17
_KIND = "nvrx-storage"


class Storage(str, enum.Enum):
    """What every access to the storage does."""

    HANG = "hang"
    STALE = "stale"
    IO_ERROR = "io_error"
    OK = "ok"


_ERRORS = {Storage.STALE: errno.ESTALE, Storage.IO_ERROR: errno.EIO}
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {doing}: {os.strerror(code)}")


def break_it(mount_point: str, mode: Storage) -> None:
    """Mount over ``mount_point``; return once the kernel has been answered that there is a server.

    Raises:
        OSError: there is no FUSE here, or this is not root.
    """
    device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _checked(
        _libc.mount(_KIND.encode(), mount_point.encode(), b"fuse", flags, options), f"mount {mount_point}"
    )
    _answer_init(device)
    if os.fork() == 0:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.chdir("/")
        _serve(device, mode)
        os._exit(0)


def mend(mount_point: str) -> None:
    """Unmount what :func:`break_it` has mounted; whoever waits there gets an error."""
    while _is_broken(mount_point):
        _checked(_libc.umount2(mount_point.encode(), _MNT_FORCE | _MNT_DETACH), f"unmount {mount_point}")


def _is_broken(mount_point: str) -> bool:
    with open("/proc/self/mountinfo") as table:
        mounts = [line.split(" ") for line in table]
    return any(fields[4] == mount_point and _KIND in fields for fields in mounts)


def _answer_init(device: int) -> None:
    request = os.read(device, _LARGEST_REQUEST)
    unique = _IN_HEADER.unpack_from(request)[2]
    answer = _INIT_OUT.pack(7, 31, 0, 0, 0, 0, 4096, 1, 1, 0, 0)
    os.write(device, _OUT_HEADER.pack(_OUT_HEADER.size + len(answer), 0, unique) + answer)


def _serve(device: int, mode: Storage) -> None:
    while True:
        try:
            request = os.read(device, _LARGEST_REQUEST)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT):  # a request that its process has given up
                continue
            return  # unmounted
        _, operation, unique, *_ = _IN_HEADER.unpack_from(request)
        if operation not in _NO_ANSWER and mode in _ERRORS:
            os.write(device, _OUT_HEADER.pack(_OUT_HEADER.size, -_ERRORS[mode], unique))


def main() -> None:
    mode, mount_point = Storage(sys.argv[1]), sys.argv[2]
    try:
        mend(mount_point)
        if mode is not Storage.OK:
            break_it(mount_point, mode)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))


if __name__ == "__main__":
    main()
