"""What ranks print arrives: in their logs, in the merged log and, of rank 0, on the job's own output."""

from __future__ import annotations

import contextlib
import re
import signal
import stat
from collections.abc import Callable

import pytest
from harness import RANK, LocalJob, until

from nvrx_slurm import journal

Jobs = Callable[..., LocalJob]
COLD = ("--warm-start", "off")
MERGED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (n\d) rank (\d): (.*)")


@pytest.mark.parametrize("warm", ["on", "off"])
def test_w18_the_last_words_of_a_killed_rank_are_kept_and_shown(job: Jobs, warm: str) -> None:
    script = (
        RANK
        + """
print("first line")
print("to stderr", file=sys.stderr)
print("no end of line", end="")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    run = job(script, "--warm-start", warm, "--max-restarts", "0")
    assert run.run() == 1
    assert run.log("rank_1") == "first line\nto stderr\nno end of line"
    lines = [MERGED.fullmatch(line).groups() for line in run.log("merged").splitlines()]
    of_rank_1 = [line for line in lines if line[1] == "1"]
    assert of_rank_1 == [("n1", "1", text) for text in ("first line", "to stderr", "no end of line")]
    assert "  rank 1 | to stderr\n" in run.stderr
    assert "  rank 1 | no end of line\n" in run.stderr


@pytest.mark.parametrize("warm", ["on", "off"])
def test_the_traceback_of_a_failed_rank_is_kept_and_shown(job: Jobs, warm: str) -> None:
    script = (
        RANK
        + """
def train():
    raise RuntimeError("NaN in the loss")

if rank == 1:
    train()
"""
    )
    run = job(script, "--warm-start", warm, "--max-restarts", "0")
    assert run.run() == 1
    for text in (run.log("rank_1"), run.log("merged"), run.stderr):
        assert "RuntimeError: NaN in the loss" in text
    assert "nvrx_slurm" not in run.log("rank_1")


def test_rank_0_speaks_for_the_job(job: Jobs) -> None:
    script = (
        RANK
        + """
print(f"loss of rank {rank}: ✓")
"""
    )
    run = job(script, *COLD, PYTHONIOENCODING="utf-8")
    assert run.run() == 0
    assert run.stdout == "loss of rank 0: ✓\n"


def test_what_the_terminal_cannot_show_does_not_stop_the_job(job: Jobs) -> None:
    script = (
        RANK
        + """
for line in range(2000):
    sys.stdout.buffer.write(f"✓ {line}\\n".encode())
"""
    )
    run = job(script, *COLD, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert run.run() == 0
    assert run.log("rank_0").count("✓") == 2000
    assert run.stdout.count("\n") == 2000


@pytest.mark.parametrize("closed", [{"stdout"}, {"stderr"}, {"stdout", "stderr"}])
def test_a_closed_terminal_does_not_stop_the_job(job: Jobs, closed: set[str]) -> None:
    script = (
        RANK
        + """
for line in range(200):
    print(line)
"""
    )
    run = job(script, *COLD, ranks=1)
    run.closed = closed
    assert run.run() == 0
    assert run.log("rank_0").count("\n") == 200


def test_w18_twenty_megabytes_of_one_rank_pass_without_loss(job: Jobs) -> None:
    script = (
        RANK
        + """
if rank == 1:
    for line in range(20_000):
        sys.stdout.write(f"{line:06d} " + "x" * 1016 + "\\n")
"""
    )
    run = job(script, *COLD, nodes=1)
    assert run.run(60) == 0
    text = run.log("rank_1")
    assert len(text) == 20_000 * 1024
    assert [int(line[:6]) for line in text.splitlines()] == list(range(20_000))
    assert run.log("merged").count("\n") == 20_000


def test_a_line_without_an_end_is_no_line_too_long(job: Jobs) -> None:
    script = (
        RANK
        + """
sys.stdout.buffer.write(b"\\xff" * 1_000_000)
"""
    )
    run = job(script, *COLD, ranks=1)
    assert run.run() == 0
    assert (run.run_dir / "cycles/0/rank_0.log").read_bytes() == b"\xff" * 1_000_000


def test_what_a_rank_said_last_before_it_fell_silent_is_in_the_merged_log(job: Jobs) -> None:
    """Whoever looks for the reason of a hang must find the last line while it hangs."""
    script = (
        RANK
        + """
print("about to hang")
write(f"ready{rank}")
while True:
    time.sleep(60)
"""
    )
    run = job(script, *COLD, ranks=1).start()
    run.wait_for_file("ready0")
    until("the line in the merged log", lambda: "about to hang" in run.log("merged"))
    run.signal(signal.SIGTERM)
    assert run.wait() == 143


def test_output_of_what_a_rank_leaves_behind_belongs_to_its_cycle(job: Jobs) -> None:
    script = (
        RANK
        + """
if rank == 0 and cycle == 0:
    talk = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('still here');"
    talk += "open(sys.argv[1], 'w'); [print('still here') or time.sleep(0.01) for _ in range(6000)]"
    subprocess.Popen([sys.executable, "-u", "-c", talk, f"{folder}/talks"], start_new_session=True)
    wait_for("talks")
    sys.exit(1)
if cycle == 0:
    signal.pause()
"""
    )
    run = job(script, *COLD, "--workers-stop-timeout", "300ms")
    assert run.run() == 0
    assert "still here" in run.log("rank_0", 0)
    assert "still here" not in run.log("rank_0", 1)
    assert run.nothing_is_left()


def test_everything_a_job_writes_is_its_owners_alone(job: Jobs) -> None:
    script = (
        RANK
        + """
print("hello")
write(f"ready{rank}")
wait_for("go_on")
"""
    )
    run = job(script, *COLD, ranks=1).start()
    run.wait_for_file("ready0")
    (private,) = run.private_dirs
    for path in (run.run_dir, private):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in [p for top in (run.run_dir, private) for p in top.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # the lease is renewed: a new file takes its place
            mode = path.stat().st_mode
            assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path
    run.touch("go_on")
    assert run.wait() == 0
    for path in run.run_dir.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_run_directory_that_fills_up_does_not_stop_the_training(job: Jobs) -> None:
    """Logs can't be written any more: that is said, and the job goes on."""
    script = (
        RANK
        + """
write(f"ready{rank}")
wait_for("go_on")
print("nobody will read this")
"""
    )
    run = job(script, *COLD, ranks=1).start()
    run.wait_for_file("ready0")
    (run.run_dir / "cycles").mkdir(exist_ok=True)
    (run.run_dir / "cycles" / "0").write_text("in the way")
    run.touch("go_on")
    assert run.wait() == 0
    assert "WARNING: the output cannot be written" in run.stderr


def test_one_run_directory_serves_one_job(job: Jobs) -> None:
    script = (
        RANK
        + """
write(f"ready{rank}")
wait_for("go_on")
"""
    )
    first = job(script, *COLD, ranks=1).start()
    first.wait_for_file("ready0")
    second = job(script, *COLD, "--run-dir", str(first.run_dir), ranks=1, SLURM_JOB_ID="1")
    assert second.run() == 2
    assert "is in use by another nvrx-srun" in second.stderr

    # and one job serves one nvrx-srun: srun would wait for the nodes of the first
    third = job(script, *COLD, ranks=1)
    assert third.run() == 2
    assert "another nvrx-srun runs in job" in third.stderr
    first.touch("go_on")
    assert first.wait() == 0


def test_a_second_run_in_the_same_directory_counts_its_cycles_on(job: Jobs) -> None:
    script = (
        RANK
        + """
print(cycle)
"""
    )
    first = job(script, *COLD, ranks=1)
    assert first.run() == 0
    second = job(script, *COLD, "--run-dir", str(first.run_dir), ranks=1, SLURM_RESTART_COUNT="1")
    assert second.run() == 0
    assert first.log("rank_0", 0) == "0\n"
    assert first.log("rank_0", 1) == "1\n"
    assert [(r.attempt, r.cycle) for r in first.records if isinstance(r.event, journal.CycleStarted)] == [
        (0, 0),
        (1, 1),
    ]
