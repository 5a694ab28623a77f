"""What docs/inprocess.md shows runs, and its tables name what there is."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

from nvrx_slurm import inprocess

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "inprocess.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)


def test_the_examples_of_the_page_run() -> None:
    environ = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    program = "\n".join(EXAMPLES)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-"],
        input=program,
        capture_output=True,
        text=True,
        timeout=250,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "returned in iteration 1" in done.stdout


def test_the_page_names_every_argument_of_the_wrapper_and_every_member_of_its_calls() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    named = {word for row in rows for word in re.findall(r"`(\w+)", row)}
    arguments = set(inspect.signature(inprocess.Wrapper).parameters)
    members = {name for name in vars(inprocess.CallWrapper) if not name.startswith("_")}
    # Said otherwise, or for the wrapper itself.
    members -= {"base_store", "end", "reset_progress"}
    assert arguments | members <= named, sorted((arguments | members) - named)
