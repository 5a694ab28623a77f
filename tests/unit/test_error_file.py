"""What a rank says of its own end, through the file that torch's ``record`` writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nvrx_slurm.agent.error_file import error_path, read_error
from nvrx_slurm.agent.failed_program import write_error_file


def test_the_file_stands_beside_the_heartbeat_page() -> None:
    assert error_path(Path("/p/cycle0-rank1.page")) == Path("/p/cycle0-rank1.error.json")


def test_it_is_what_torch_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "e"))

    @errors.record
    def main() -> None:
        raise ValueError("loss is\nnan")

    with pytest.raises(ValueError, match="loss is"):
        main()
    assert read_error(tmp_path / "e") == "ValueError: loss is nan"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (json.dumps({"message": "as text"}), "as text"),
        (json.dumps({"message": {"message": "x" * 9999, "extraInfo": {}}}), "x" * 500),
        ("{", ""),
        ("[]", ""),
        (json.dumps({"message": 7}), ""),
        (json.dumps({"message": "\x1b]0;own title\x07\u202e"}), "\ufffd]0;own title\ufffd\ufffd"),
        ('{"message": ' + "[" * 9999, ""),
        ("\xff", ""),
    ],
)
def test_whatever_it_holds_it_makes_one_line_or_none(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "e").write_text(content)
    assert read_error(tmp_path / "e") == said


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps({"message": "not yours"}))
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("link", "fifo", "folder", "none"):
        assert read_error(tmp_path / name) == "", name


def test_of_a_huge_message_the_beginning_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "e"))
    write_error_file(ValueError("x" * 2_000_000))
    assert read_error(tmp_path / "e").startswith("ValueError: xxx")
