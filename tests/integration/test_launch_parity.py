"""``nvrx-launch`` as its page shows it, and its ranks beside those of the torchrun that is installed."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from typing import Any

import pytest
from harness import BIN, HERE, until
from launchers import LaunchedJob

CLONE = HERE.parent.parent
TELL = """
import json, os, sys
with open(f"{os.environ['TEST_FOLDER']}/{os.environ['WHO']}{os.environ['RANK']}", "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "main": __name__}, file)
"""
MUST_DIFFER = {
    "MASTER_PORT": "each job has a store of its own",
    "TORCHELASTIC_RUN_ID": "each standalone job has an id of its own",
    "TORCHELASTIC_ERROR_FILE": "each launcher has files of its own",
    "MASTER_ADDR": "a name or an address of this machine",
    "WHO": "of the test",
    "NVRX_RUN_DIR": "of the test",
}
OURS = ("NVRX_",)
OF_IMPORTING_TORCH = {"TORCHINDUCTOR_CACHE_DIR": "set by torch itself, which a warm start has imported"}
OF_THE_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
OF_TORCHRUN_ALONE = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "said by torchrun to itself"}


def test_the_example_of_the_page_trains_and_is_reported(launched: partial[LaunchedJob]) -> None:
    page = (CLONE / "docs" / "launch.md").read_text()
    example = page.partition("```sh\n")[2].partition("```")[0]
    job = launched("", real_torch=True)
    (job.root / "examples").symlink_to(CLONE / "examples")
    environment = {name: value for name, value in job.environment.items() if name != "NVRX_RUN_DIR"}
    done = subprocess.run(
        ["bash", "-euc", example],
        env={**environment, "PATH": f"{BIN}:{os.environ['PATH']}"},
        cwd=job.root,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "step 20" in done.stdout, done.stdout
    assert "finished" in done.stdout
    until("all has ended", lambda: not job.processes())


def run_torchrun(job: LaunchedJob, *options: str) -> None:
    environment = {**job.environment, "WHO": "torchrun", "TEST_NODE": "n1"}
    subprocess.run(
        [str(BIN / "torchrun"), *options, str(job.script), *job.arguments],
        env=environment,
        cwd=job.root,
        check=True,
        capture_output=True,
        timeout=250,
    )


def told(job: LaunchedJob, who: str, rank: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((job.root / f"{who}{rank}").read_text())
    return document


@pytest.mark.parametrize(
    "options",
    [
        ("--standalone", "--nproc-per-node=2", "--max-restarts=4", "--role=trainer"),
        ("--standalone", "--nproc_per_node=2", "--virtual-local-rank", "--no-python"),
        ("--nproc-per-node=1",),
    ],
    ids=lambda options: options[-1],
)
def test_a_rank_finds_what_it_finds_under_torchrun(
    launched: partial[LaunchedJob], options: tuple[str, ...]
) -> None:
    job = launched(TELL, real_torch=True)
    job.environment["CUDA_VISIBLE_DEVICES"] = "5,3"
    job.environment["PYTHONPATH"] = ""
    job.arguments += ["--lr", "0.1", "--nproc-per-node", "9"]
    if "--no-python" in options:
        job.script.write_text("#!" + str(BIN / "python") + job.script.read_text())
        job.script.chmod(0o755)
    run_torchrun(job, *options)
    for warm_start in ("on", "off"):
        own = {"WHO": f"warm_{warm_start}", "NVRX_RUN_DIR": str(job.root / f"run_{warm_start}")}
        job.launch("n1", *options, "--warm-start", warm_start, **own)
        assert job.code() == 0, job.stderr
        for rank in range(2 if "=2" in " ".join(options) else 1):
            compare(told(job, own["WHO"], rank), told(job, "torchrun", rank), is_warm=warm_start == "on")


def compare(ours: dict[str, Any], theirs: dict[str, Any], *, is_warm: bool) -> None:
    assert [ours[key] for key in ("argv", "cwd", "main")] == [theirs[key] for key in ("argv", "cwd", "main")]
    env, other = ours["env"], theirs["env"]
    extra = {name for name in env.keys() - other.keys() if not name.startswith(OURS)}
    of_torch = OF_IMPORTING_TORCH.keys() if is_warm else set()
    assert extra <= OF_THE_FLIGHT_RECORDER | of_torch
    assert other.keys() - env.keys() <= OF_TORCHRUN_ALONE.keys()
    different = {name for name in env.keys() & other.keys() if env[name] != other[name]}
    assert different <= MUST_DIFFER.keys(), {name: (env[name], other[name]) for name in different}
    assert env["MASTER_PORT"].isdigit()
    assert os.path.isabs(env["TORCHELASTIC_ERROR_FILE"])
