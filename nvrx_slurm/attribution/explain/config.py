"""Which model is asked, and how; a file, so that no key is ever an argument."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.site_file import SiteFileError, read_text, read_yaml

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ExplainConfigError(ValueError):
    """The file is wrong; the message says where, what, and what is accepted."""


class ExplainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An OpenAI-compatible endpoint."""

    endpoint: str
    """Such as ``https://host/v1``; plain http for this machine only."""
    model: str
    key_file: str = ""
    """A file that only its owner can read; empty: the endpoint needs no key."""
    timeout_s: float = 60.0
    max_evidence_bytes: int = 32 * 1024

    def key(self) -> str:
        """Return the key.

        Raises:
            ExplainConfigError: its file cannot be read, or others can read it.
        """
        if not self.key_file:
            return ""
        path = Path(self.key_file).expanduser()
        try:
            if path.stat().st_mode & 0o077:
                raise ExplainConfigError(f"key_file {path} can be read by others: chmod 600 it")
            return read_text(path).strip()
        except OSError as error:
            raise ExplainConfigError(f"key_file {path}: {error.strerror}") from error
        except SiteFileError as error:
            raise ExplainConfigError(f"key_file {path}: {error}") from error


def load_explain_config(path: Path) -> ExplainConfig:
    """Read the YAML file.

    Raises:
        ExplainConfigError
    """
    try:
        config = msgspec.convert(read_yaml(path), ExplainConfig)
    except SiteFileError as error:
        raise ExplainConfigError(f"explain file {path}: {error}") from error
    except msgspec.ValidationError as error:
        accepted = ", ".join(ExplainConfig.__struct_fields__)
        raise ExplainConfigError(f"explain file {path}: {error}; accepted: {accepted}") from error
    address = urllib.parse.urlsplit(config.endpoint)
    if address.scheme != "https" and not (address.scheme == "http" and address.hostname in _LOOPBACK):
        raise ExplainConfigError(
            f"explain file {path}: endpoint {config.endpoint}: https is expected, or http on this machine"
        )
    return config
