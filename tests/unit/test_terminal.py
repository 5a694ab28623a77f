"""What the Coordinator prints reaches whoever reads, and waits for nobody."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from nvrx_slurm.coordinator.terminal import Terminal

_PROGRAM = """
import sys
from nvrx_slurm.coordinator.terminal import Terminal, open_standard_streams
open_standard_streams()
terminal = Terminal()
for number in range({lines}):
    terminal.say("anybody? " + "x" * 100)
    terminal.show(b"output " + b"x" * 100 + bytes([10]))
terminal.close(0.5)
sys.exit(7)
"""


def _run(lines: int, **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _PROGRAM.format(lines=lines)], **streams)


def test_a_line_is_stamped_and_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.say("received SIGTERM")
    terminal.close(10)
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"nvrx-srun \d\d:\d\d:\d\d received SIGTERM\n", err)


def test_a_line_can_not_move_the_cursor_of_who_reads_it(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.say("rank 3 | \x1b[2J\x07gone\r")
    terminal.close(10)
    assert capfd.readouterr().err.endswith("rank 3 | \ufffd[2J\ufffdgone\ufffd\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_does_not_read_holds_up_nothing(stream: str) -> None:
    # More than a pipe holds.
    other = "stderr" if stream == "stdout" else "stdout"
    with _run(5000, **{stream: subprocess.PIPE, other: subprocess.DEVNULL}) as process:
        assert process.wait(100) == 7


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_left_does_not_change_the_exit_code(stream: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    other = "stderr" if stream == "stdout" else "stdout"
    with _run(3, **{stream: writer, other: subprocess.DEVNULL}) as process:
        os.close(writer)
        assert process.wait(100) == 7


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"])
def test_closed_and_full_streams_do_not_change_the_exit_code(redirection: str) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(lines=3)]
    done = subprocess.run(["sh", "-c", f'"$@" {redirection}', "sh", *command], check=False, timeout=250)
    assert done.returncode == 7
