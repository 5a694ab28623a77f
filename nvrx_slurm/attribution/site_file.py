"""Read the small YAML files that a site or a user writes; what stands there instead may have no end."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

import yaml

from nvrx_slurm.attribution.logs.reading import open_log

MAX_BYTES = 2**20
PATIENCE_S = 60.0
"""For a pipe, such as a shell makes of ``<(...)``, whose writer is silent."""


class SiteFileError(ValueError):
    """The file can't be read or is no YAML; the message says why in one sentence, without the path."""


def read_text(path: Path) -> str:
    """Return the text of a file or pipe.

    Raises:
        SiteFileError: it is neither, can't be read, is larger than 1 MiB or no UTF-8; its writer is silent.
    """
    try:
        with open_log(path) as file:
            return _read(file.fileno()).decode()
    except OSError as error:
        raise SiteFileError(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise SiteFileError(f"UTF-8 is expected, and byte {error.start} is none") from error


def read_yaml(path: Path) -> Any:
    """Return what the YAML file holds, as plain values.

    Raises:
        SiteFileError: as :func:`read_text`, or it is no YAML.
    """
    text = read_text(path)
    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise SiteFileError("no YAML: " + " ".join(str(error).split())) from error
    except RecursionError as error:
        raise SiteFileError("no YAML that can be read: it is nested too deep") from error
    except ValueError as error:  # such as a date of a 13th month
        raise SiteFileError(f"no YAML: {error}") from error


def _read(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data, until = b"", time.monotonic() + PATIENCE_S
    while True:
        try:
            piece = os.read(fd, MAX_BYTES)  # a pipe without a writer is at its end
        except BlockingIOError:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise SiteFileError(f"its writer was silent for {PATIENCE_S:g} s") from None
            continue
        if not piece:
            return data
        data += piece
        if len(data) > MAX_BYTES:
            raise SiteFileError(f"larger than {MAX_BYTES >> 20} MiB")
