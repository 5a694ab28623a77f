"""csrc/cupti under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

Run by hand after a change of csrc/cupti: ``.venv/bin/python -m pytest -n0 -m sanitizers``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "csrc" / "cupti_sim" / "sanitize.sh"


@pytest.mark.sanitizers
@pytest.mark.timeout(600)
def test_threads_that_launch_and_take_break_no_rule_of_memory_or_order() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["address,undefined: passed", "thread: passed"]
