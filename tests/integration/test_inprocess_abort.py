"""A collective of gloo that would not end does when its groups are aborted, and nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RANK = Path(__file__).with_name("inprocess_abort_rank.py")
RANKS = 3


def test_an_abort_ends_gloo_collectives_and_leaves_other_sockets_alone(tmp_path: Path) -> None:
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "TORCH_CPP_LOG_LEVEL": "error"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(tmp_path), str(rank), str(RANKS)],
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(RANKS)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=250)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank in found:
        assert (rank["user_socket"], rank["user_store"]) == ("x", "there")
        assert not rank["initialized"]
        assert rank["sum"] == RANKS
    for rank in found[1:]:
        assert rank["error"] == "RuntimeError"
    # Without it they would wait until the time-out of the groups.
    assert max(rank["unblocked_at"] for rank in found[1:]) - found[0]["abort_at"] < 30
    for rank, name in enumerate(sorted(path.name for path in (tmp_path / "traces/iter_4").iterdir())):
        assert name == f"_dump_{rank}.json"
        assert json.loads((tmp_path / "traces/iter_4" / name).read_text())["pg_config"]
