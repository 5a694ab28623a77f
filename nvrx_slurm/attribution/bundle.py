"""An archive for whoever looks into a failure elsewhere: the verdict and the lines around what was found."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from rich.console import Console

from nvrx_slurm.attribution import redact
from nvrx_slurm.attribution.logs.finding import Finding
from nvrx_slurm.attribution.logs.reading import open_log
from nvrx_slurm.attribution.render import render
from nvrx_slurm.attribution.verdict import Attribution
from nvrx_slurm.whole_file import replacing

_AROUND = 30
_TAIL = 200
_MAX_LINE = 2000
_MAX_FINDINGS = 12
_ZSTD, _GZIP = ".tar.zst", ".tar.gz"


class BundleError(ValueError):
    """The bundle cannot be written as asked; the message says what is accepted."""


@dataclass(frozen=True)
class Written:
    """Where the bundle is, and why not where it was asked for."""

    path: Path
    note: str = ""

    def say(self) -> str:
        return f"evidence is in {self.path}" + (f" ({self.note})" if self.note else "")


def write_bundle(result: Attribution, path: Path) -> Written:
    """Write the archive, mode 0600, whole or not at all.

    Raises:
        BundleError: the name has another ending.
        OSError: it cannot be written.
    """
    name = path.name
    if not name.endswith((_ZSTD, _GZIP)):
        raise BundleError(f"--bundle {path}: a name that ends in {_ZSTD} or {_GZIP} is expected")
    if not path.parent.is_dir():
        raise BundleError(f"--bundle {path}: there is no directory {path.parent}")
    note = ""
    if name.endswith(_ZSTD) and not _have_zstandard():
        path = path.with_name(name.removesuffix(_ZSTD) + _GZIP)
        note = "gzip instead: zstandard is not installed, pip install 'nvrx-slurm[bundle]'"
    with (
        replacing(path) as file,
        _compressed(file, path) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        for member, text in _members(result):
            _add(archive, member, text)
    return Written(path, note)


def _have_zstandard() -> bool:
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _compressed(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.name.endswith(_ZSTD):
        import zstandard

        with zstandard.ZstdCompressor(level=10).stream_writer(file, closefd=False) as stream:
            yield stream
    else:
        import gzip

        with gzip.GzipFile(fileobj=file, mode="wb") as zipped:
            yield cast(IO[bytes], zipped)


def _members(result: Attribution) -> Iterator[tuple[str, str]]:
    yield "verdict.json", json.dumps(result.document(), indent=2)
    console = Console(file=io.StringIO(), width=120, highlight=False, markup=False)
    console.print(render(result))
    assert isinstance(console.file, io.StringIO)
    yield "report.txt", console.file.getvalue()
    for number, file in enumerate(result.coverage.files):
        findings = [f for f in _all_findings(result) if str(f.source.path) == file]
        with contextlib.suppress(OSError):
            yield f"logs/{number}_{Path(file).name}", _excerpts(Path(file), findings[:_MAX_FINDINGS])


def _all_findings(result: Attribution) -> list[Finding]:
    primary = [result.choice.primary] if result.choice.primary else []
    return [*primary, *(finding for finding, _ in result.choice.secondary), *result.choice.recovered]


def _excerpts(path: Path, findings: list[Finding]) -> str:
    """Return the lines around the findings, and the end of the file, each with its number."""
    wanted = sorted((max(1, f.line - _AROUND), f.line + _AROUND) for f in findings)
    kept: list[str] = []
    tail: list[str] = []
    follow_link = not any(finding.source.is_run_dirs for finding in findings)
    with open_log(path, follow_link=follow_link) as file:
        for number, raw in enumerate(_lines(file), start=1):
            text = f"{number}: {raw.decode('utf-8', 'replace').rstrip()}"
            while wanted and number > wanted[0][1]:
                wanted.pop(0)
            if wanted and wanted[0][0] <= number:
                kept.append(text)
            else:
                tail.append(text)
                if len(tail) > 2 * _TAIL:
                    del tail[:_TAIL]
    return "\n".join([*kept, "… the end:", *tail[-_TAIL:]]) + "\n"


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines, of overlong ones the beginning."""
    while line := file.readline(_MAX_LINE):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
            pass
        yield line


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = redact.secrets(text).encode(errors="replace")  # names of files need not be UTF-8
    member = tarfile.TarInfo(f"nvrx-attribution/{name}".encode(errors="replace").decode())
    member.size, member.mode = len(data), 0o600
    archive.addfile(member, io.BytesIO(data))
