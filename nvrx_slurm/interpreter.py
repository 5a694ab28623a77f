"""Run modules of this package in interpreters of their own."""

from __future__ import annotations

import sys
from pathlib import Path

_RUN = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "from importlib import import_module; import_module(sys.argv[1]).main()"
)


def command_for(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of ``module``, with ``arguments`` from ``sys.argv[2]`` on.

    ``python -m`` would look into the working directory first, and a user's ``queue.py`` or ``socket.py``
    there would take the place of Python's own.
    """
    return [sys.executable, "-u", "-c", _RUN, module, *arguments]


def runs(pid: int, module: str) -> bool:
    """Whether the process was started with :func:`command_for` this module (proc(5)); False: it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
    except OSError:
        return False
    return arguments[2:5] == [b"-c", _RUN.encode(), module.encode()]


def console_script(name: str) -> str:
    """Return the path of a command of this package's own installation."""
    return str(Path(sys.prefix) / "bin" / name)
