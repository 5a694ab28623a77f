"""The calculated time-outs of a job, kept in ``ft_state.json`` for its later cycles and for later jobs.

The file is ``RankMonitorClient.state_dict`` with a version beside it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from nvrx_slurm.whole_file import replace_file
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts, to_state, with_state

_VERSION = 1


class FtStateError(ValueError):
    """The file can't be used; the message says which, why, and what to do."""


def load_ft_state(path: Path, configured: Monitoring) -> Monitoring:
    """Return ``configured`` with the calculated values of ``path``, if there is such a file, in its place.

    Raises:
        FtStateError: the file can't be read or is not what :func:`save_ft_state` writes.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return configured
    except OSError as error:
        raise FtStateError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        document = msgspec.json.decode(data, type=dict[str, object])
        version = document.pop("v", None)
        if version != _VERSION:
            raise ValueError(f"version {version!r}, {_VERSION} is accepted")
        return with_state(configured, document)
    except ValueError as error:
        raise FtStateError(f"{path}: {error}; remove it, or do without it: --ft-calc-timeouts off") from error


def save_ft_state(path: Path, heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> None:
    """Write the calculated values so that a reader sees the old file or the new one, whole.

    Raises:
        OSError: the directory can't be written.
    """
    document = {"v": _VERSION, **to_state(heartbeat, section)}
    replace_file(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def adopt(current: Monitoring, heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> Monitoring:
    """Return ``current`` with what a rank has calculated.

    Raises:
        ValueError: the values are none of this job's sections, or no time-outs.
    """
    if list(section.section) != list(current.section.section):
        raise ValueError("they are of other sections than this job's")
    return with_state(current, to_state(heartbeat, section))
