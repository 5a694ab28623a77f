"""NVIDIA's released package in a virtual environment of its own, made once and kept."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VERSION = "0.4.1"
_CLONE = Path(__file__).resolve().parents[2]
# msgspec: the worker imports our client beside it, as it does under every contender. NumPy: its checkpointing
# imports it, but it is not among its requirements.
_PACKAGES = (f"nvidia-resiliency-ext=={VERSION}", "torch", "msgspec", "numpy")


class PeerError(RuntimeError):
    """The peer could not be installed; the message is one sentence."""


def environment_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nvrx-bench" / f"peer-{VERSION}"


def ensure_installed(say: Callable[[str], None]) -> Path:
    """Return the peer's virtual environment, with torch of the version that ``constraints.txt`` pins.

    Raises:
        PeerError: pip could not install it.
    """
    place = environment_dir()
    constraints = _CLONE / "constraints.txt"
    wanted = "\n".join((*_PACKAGES, sys.version, constraints.read_text()))
    stamp = place / "installed"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return place
        say(f"installing nvidia-resiliency-ext {VERSION} in {place} (about a minute)")
        _run(sys.executable, "-m", "venv", "--clear", str(place))
        pip = (str(place / "bin" / "python"), "-m", "pip", "install", "--no-input", "-q")
        _run(*pip, "--disable-pip-version-check", "-c", str(constraints), *_PACKAGES)
        stamp.write_text(wanted)
    return place


def _run(*argv: str) -> None:
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise PeerError(f"nvidia-resiliency-ext {VERSION} could not be installed for --peer nvrx: {last}")
