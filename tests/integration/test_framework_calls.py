"""What Megatron-LM and NeMo call, in their order: by the names that they import and probe for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

PATIENCE_S = 240.0
WORLD = 2
pytestmark = pytest.mark.timeout(PATIENCE_S + 30)


@pytest.fixture(scope="module")
def saw(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("framework")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = Path(__file__).parent / "framework_rank.py"
    environ = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        subprocess.Popen([sys.executable, script, folder], env=environ | {"RANK": str(rank)})
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            assert rank.wait(PATIENCE_S) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"saw{rank}.json").read_text()) for rank in range(WORLD)]


def test_a_global_checkpoint_as_megatron_saves_it_survives_a_reset_of_the_worker(
    saw: list[dict[str, Any]],
) -> None:
    for each in saw:
        assert each["global"] == {
            "finalized": [[0], [1], []],
            "pending": [1, 0],
            "tracker": "30",  # 20 was aborted
            "committed": [10, 15, 30],
            "loaded": 30.0,
            "cached": [[False, False], [True, False], [False, True]],
        }


def test_a_local_checkpoint_as_megatron_saves_it_is_loaded_after_a_restart(saw: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(saw):
        assert each["local"] == {
            "before": -1,
            "found": 2,
            "id": [2, rank, ""],
            "equal": True,
            "names": sorted(f"iter_0000002_{owner}_local.pt" for owner in range(WORLD)),
            "parsed": [2, rank],
            "same bytes": True,
            "after a failure": "CheckpointingException",
            "left": [],
        }
