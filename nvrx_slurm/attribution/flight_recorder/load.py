"""Read one Flight Recorder dump that a stranger may have written: size capped, nothing executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any, NoReturn

import msgspec

MAX_DUMP_BYTES = 256 * 2**20
"""torch writes about 200 bytes an entry; a ring of 2,000 entries with stacks stays below 10 MB."""
MAX_ENTRIES = 1_000_000
_READ_AHEAD = 1 << 20
"""With a buffer that can be peeked into, the unpickler does not call for every opcode: four times as fast."""
_PICKLE_MAGIC = b"\x80"
_JSON_MAGIC = b"{"
_SUPPORTED_MAJOR = "2"


class DumpError(ValueError):
    """The file is no usable dump; the message says why, without its path."""


class _BuiltinsOnly(pickle.Unpickler):
    """Dumps hold built-in types only; whatever asks for a global is an attack."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DumpError(f"refused: the pickle asks for {module}.{name}, and a dump holds plain data only")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DumpError("refused: the pickle refers to objects outside of it")


def looks_like_dump(path: Path) -> bool:
    """Tell by the first byte whether the file may be a dump: pickle or JSON."""
    try:
        return read_capped(path, 1)[:1] in (_PICKLE_MAGIC, _JSON_MAGIC)
    except (OSError, DumpError):
        return False


def read_capped(path: Path, limit: int) -> bytes:
    """Return at most ``limit`` bytes of a regular file; links, pipes and devices are refused.

    Raises:
        OSError: the file cannot be read, or is a symbolic link.
        DumpError: it is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DumpError("not a regular file")
        return file.read(limit)


def parse_dump(data: bytes) -> dict[str, Any]:
    """Return the dump as plain dictionaries and lists.

    Raises:
        DumpError: too large, truncated, hostile, or of another major version.
    """
    if len(data) > MAX_DUMP_BYTES:
        raise DumpError(f"larger than {MAX_DUMP_BYTES // 2**20} MiB")
    if data[:1] == _PICKLE_MAGIC:
        dump = _unpickle(data)
    elif data.lstrip()[:1] == _JSON_MAGIC:
        dump = _from_json(data)
    else:
        raise DumpError("empty" if not data else "neither a pickle nor JSON")
    if not isinstance(dump, dict):
        raise DumpError(f"holds a {type(dump).__name__}, not a dictionary")
    version = str(dump.get("version", ""))
    if version.split(".")[0] != _SUPPORTED_MAJOR:
        raise DumpError(f"version {version[:20] or 'missing'}: versions {_SUPPORTED_MAJOR}.* are understood")
    entries = dump.get("entries") or []
    if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
        raise DumpError(f"entries: a list of at most {MAX_ENTRIES:,} is expected")
    return dump


def _unpickle(data: bytes) -> Any:
    try:
        return _BuiltinsOnly(io.BufferedReader(io.BytesIO(data), _READ_AHEAD)).load()
    except DumpError:
        raise
    except (EOFError, MemoryError, RecursionError) as error:
        raise DumpError(f"the pickle is cut off or too deep ({type(error).__name__})") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DumpError(f"the pickle is damaged ({type(error).__name__})") from error


def _from_json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        raise DumpError("the JSON is nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if b"NaN" in data or b"Infinity" in data:
            return _from_lax_json(data)
        raise DumpError(f"the JSON is cut off or damaged ({str(error)[:80]})") from error


def _from_lax_json(data: bytes) -> Any:
    """Read JSON with NaN and Infinity in it, as Python's own writer leaves it."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise DumpError("the JSON is nested too deep") from error
    except ValueError as error:
        raise DumpError(f"the JSON is cut off or damaged ({str(error)[:80]})") from error
