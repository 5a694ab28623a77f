"""The job's secret, where several nodes must share it: a file of the user's alone.

Whoever can read it can join the job. So it is created by the node that coordinates, and never believed if
somebody else could have read or written it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path

from nvrx_slurm.regular_file import open_regular
from nvrx_slurm.wire.rpc import new_token

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,256}")
_POLL_S = 0.2
"""Only while a node waits for the file at its start: a shared file system tells of nothing."""


class TokenFileError(RuntimeError):
    """There is no usable token; the message says why and what to do."""


def read_token(path: Path) -> str | None:
    """Return the token, None if there is no file.

    Raises:
        TokenFileError: the file is another user's, open to others, or holds no token.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenFileError(f"token file {path}: {error.strerror}") from error
    with open(fd, encoding="ascii", errors="replace") as file:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid():
            raise TokenFileError(f"token file {path} belongs to uid {info.st_uid}, not to you")
        if info.st_mode & 0o077:
            raise TokenFileError(
                f"token file {path} is open to others (mode {stat.S_IMODE(info.st_mode):04o}): `chmod 600` "
                "it, or delete it for a new one"
            )
        text = file.read(1024).strip()
    if not _TOKEN.fullmatch(text):
        raise TokenFileError(
            f"token file {path} holds no token (32 to 256 letters, digits, - or _): delete it for a new one"
        )
    return text


def read_or_create_token(path: Path) -> str:
    """Return the token of ``path``; make one, mode 0600, if there is none.

    Raises:
        TokenFileError
    """
    token = read_token(path)
    if token is not None:
        return token
    # A link to a complete file: whoever reads it never finds half of it, and of two writers the first wins.
    draft = path.with_name(f"{path.name}.{os.getpid()}.{new_token()[:8]}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="ascii") as file:
                file.write(new_token() + "\n")
                file.flush()
                os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    except OSError as error:
        raise TokenFileError(
            f"token file {path} cannot be created: {error.strerror}; choose another with --token-file"
        ) from error
    token = read_token(path)
    if token is None:
        raise TokenFileError(f"token file {path} was deleted as soon as it was there")
    return token


def wait_for_token(path: Path, patience_s: float) -> str:
    """Return the token once the node that coordinates has created it.

    Raises:
        TokenFileError: also when it has not, within ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while (token := read_token(path)) is None:
        if time.monotonic() >= deadline:
            raise TokenFileError(
                f"token file {path} did not appear within {patience_s:g} s: the node that coordinates the "
                "job creates it, on a file system that all nodes must share; --token-file or NVRX_TOKEN_FILE "
                "names another"
            )
        time.sleep(_POLL_S)
    return token
