"""A rank forked from a warm interpreter can't tell that it is not one that was started afresh.

Where a test is not about torch itself, the warm interpreter has imported a stub of it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import BIN, RANK, LocalJob

from nvrx_slurm import journal

Jobs = Callable[..., LocalJob]

OBSERVES = '''
"""A docstring."""
import atexit, json, locale, os, random, signal, sys, threading

name = sys.argv[1]
import numpy, torch

def where(path):
    return os.readlink(path)

seen = {
    "argv": sys.argv[2:],
    "name": __name__,
    "doc": __doc__,
    "file": __file__,
    "main": sorted(k for k in vars(sys.modules["__main__"]) if k.startswith("__")),
    "spec": __spec__,
    "package": __package__,
    "builtins": __builtins__.__name__,
    "main is this": sys.modules["__main__"].__dict__ is globals(),
    "cwd": os.getcwd(),
    "path": sys.path,
    "executable": sys.executable,
    "flags": str(sys.flags),
    "streams": [
        str((s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode))
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "stdin": where("/proc/self/fd/0"),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
    "one pipe": where("/proc/self/fd/1").startswith("pipe:"),
    "the same": where("/proc/self/fd/1") == where("/proc/self/fd/2"),
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "wakeup": signal.set_wakeup_fd(-1),
    "leader": os.getpid() == os.getpgrp() == os.getsid(0),
    "excepthook": sys.excepthook is sys.__excepthook__,
    "threads": [t.name for t in threading.enumerate()],
    "main thread": threading.main_thread() is threading.current_thread(),
    "native id": threading.get_native_id() == os.getpid(),
    "umask": os.umask(0o22),
    "locale": locale.setlocale(locale.LC_ALL),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    "loader": type(__loader__).__name__,
    "source": len(__loader__.get_source("__main__")),
    "torch threads": torch.get_num_threads(),
    "grad": torch.is_grad_enabled(),
    "environment": {k: v for k, v in os.environ.items() if k != "_"},
    "random": [random.random(), numpy.random.rand(), *torch.rand(2).tolist()],
}
with open(f"{os.environ['TEST_FOLDER']}/{name}", "w") as file:
    json.dump(seen, file)
'''


def observe_afresh(run: LocalJob, environment: dict[str, str], arguments: list[str]) -> dict[str, object]:
    """What the same program sees when Python is started for it, in the environment of rank 0."""
    subprocess.run(
        [str(BIN / "python"), "-u", str(run.script), "fresh", *arguments],
        env=environment,
        cwd=run.root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        check=True,
        timeout=250,
    )
    return json.loads((run.root / "fresh").read_text())


def test_a_warm_rank_sees_what_a_fresh_interpreter_sees(job: Jobs) -> None:
    arguments = ["--flag", "two words", ""]
    run = job(OBSERVES, ranks=1, arguments=["warm", *arguments], real_torch=True, PYTHONWARNINGS="ignore")
    assert run.run(90) == 0
    assert run.events(journal.WorkersStarted)[0].warm
    warm = json.loads((run.root / "warm").read_text())
    fresh = observe_afresh(run, warm["environment"], arguments)
    assert warm.pop("one pipe") is True
    fresh.pop("one pipe")
    assert not set(warm.pop("random")) & set(fresh.pop("random")), "each interpreter draws its own"
    assert warm["argv"] == arguments
    different = {key: (warm[key], fresh[key]) for key in fresh if warm[key] != fresh[key]}
    assert not different, json.dumps(different, indent=1)


def test_no_two_ranks_draw_the_same_numbers_in_any_cycle(job: Jobs) -> None:
    script = (
        RANK
        + """
import json, random, tempfile
import numpy, torch

drawn = [random.random(), numpy.random.rand(), torch.rand(1).item(), next(tempfile._get_candidate_names())]
write(f"drawn{rank}.{cycle}", json.dumps(drawn))
if cycle == 0:
    wait_for(f"drawn{1 - rank}.0")
    sys.exit(1)
"""
    )
    run = job(script, ranks=2, real_torch=True)
    assert run.run(90) == 0
    draws = [json.loads(run.wait_for_file(f"drawn{rank}.{cycle}")) for rank in (0, 1) for cycle in (0, 1)]
    numbers = [number for drawn in draws for number in drawn]
    assert len(set(numbers)) == len(numbers) == 16


# --- how a program ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ends",
    [
        "pass",
        "sys.exit()",
        "sys.exit(0)",
        "sys.exit(3)",
        "sys.exit('a text')",
        "raise SystemExit(None)",
        "raise ValueError('wrong')",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)",
        "os._exit(7)",
        "os.abort()",
        "exec('this is no Python')",
        "def broken(:",
        "1 / 0",
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late thread'))).start()",
        "threading.Thread(target=lambda: 1 / 0).start()",
        "sys.excepthook = lambda *_: print('a hook of mine'); 1 / 0",
        "sys.stdout.write('no end of line')",
        "try:\n    raise KeyError(1)\nexcept KeyError:\n    raise ValueError(2)",
        "def deep(n):\n    return 1 / 0 if n == 0 else deep(n - 1)\ndeep(3)",
        "sys.stderr.close()",
        "os.close(1)",
    ],
)
def test_a_warm_rank_ends_as_a_fresh_interpreter_does(job: Jobs, ends: str) -> None:
    """The same exit code or signal, and the same words, to the letter."""
    script = "import atexit, os, signal, sys, threading, time\n"
    script += "atexit.register(print, 'the end')\nprint('the beginning')\n" + ends + "\n"
    run = job(script, "--max-restarts", "0", ranks=1)
    code = run.run()
    fresh = subprocess.run(
        [sys.executable, "-u", str(run.script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run.root,
        check=False,
        timeout=250,
    )
    assert run.log("rank_0") == fresh.stdout
    faults = run.events(journal.FaultDetected)
    if fresh.returncode == 0:
        assert (code, faults) == (0, [])
    else:
        assert code == 1
        seen = -signal.Signals[faults[0].signal] if faults[0].signal else faults[0].exit
        assert seen == fresh.returncode


@pytest.mark.parametrize("warm", ["on", "off"])
def test_a_script_that_cannot_be_read_any_more_is_named(job: Jobs, warm: str) -> None:
    run = job(
        "import os, sys; os.unlink(__file__); sys.exit(1)",
        "--warm-start",
        warm,
        "--max-restarts",
        "1",
        ranks=1,
    )
    assert run.run() == 1
    assert [fault.exit for fault in run.events(journal.FaultDetected)] == [1, 2]
    assert "No such file or directory" in run.log("rank_0", 1)


# --- what programs do --------------------------------------------------------------------------------


def test_a_warm_rank_can_start_processes_by_every_method(job: Jobs) -> None:
    script = (
        RANK
        + """
import multiprocessing

def square(number):
    return number * number

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(square, [1, 2, 3]), flush=True)
"""
    )
    run = job(script, ranks=1)
    assert run.run(60) == 0
    assert run.log("rank_0").splitlines() == [
        f"{method} [1, 4, 9]" for method in ("fork", "spawn", "forkserver")
    ]
    assert run.nothing_is_left()


def test_modules_beside_the_script_are_found_and_those_in_the_working_directory_are_not(job: Jobs) -> None:
    script = (
        RANK
        + """
import beside
print(beside.__file__)
try:
    import elsewhere
except ImportError as error:
    print(error)
"""
    )
    run = job(script, ranks=1)
    (run.root / "scripts").mkdir()
    moved = run.script.rename(run.root / "scripts" / "train.py")
    run.replace_script(moved)
    (run.root / "scripts" / "beside.py").touch()
    (run.root / "elsewhere.py").touch()
    assert run.run() == 0
    assert run.log("rank_0") == f"{run.root}/scripts/beside.py\nNo module named 'elsewhere'\n"


@pytest.mark.parametrize("warm", ["on", "off"])
def test_files_of_the_working_directory_do_not_get_in_our_way(job: Jobs, warm: str) -> None:
    """Python puts the working directory before everything else when it is asked for a module."""
    run = job(RANK + 'print("fine")', "--warm-start", warm, ranks=1)
    (run.root / "scripts").mkdir()
    run.replace_script(run.script.rename(run.root / "scripts" / "train.py"))
    for name in ("select", "array", "socket", "signal", "msgspec", "asyncio", "token", "queue"):
        (run.root / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    (run.root / "nvrx_slurm").mkdir()
    (run.root / "nvrx_slurm" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    assert run.run() == 0
    assert run.log("rank_0") == "fine\n"


def test_a_torch_that_cannot_be_imported_is_left_to_the_script(job: Jobs) -> None:
    """On a node with a broken installation the script itself shows what is wrong."""
    run = job(RANK + "import torch", "--max-restarts", "0", ranks=1)
    broken = run.root / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    (broken / "distributed.py").touch()
    run.environment_of_agents(PYTHONPATH=str(broken.parent))
    assert run.run() == 1
    (started,) = run.events(journal.WorkersStarted)
    assert not started.warm
    assert "torch could not be imported" in started.why_cold
    assert "OSError: libcudart.so" in run.log("rank_0")


def test_a_preloaded_module_with_threads_makes_ranks_start_afresh(job: Jobs) -> None:
    run = job(RANK + 'print("fine")', ranks=1)
    threads = run.root / "threads" / "torch"
    threads.mkdir(parents=True)
    (threads / "__init__.py").write_text(
        "import threading\nclass cuda: is_initialized = lambda: False\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (threads / "distributed.py").touch()
    run.environment_of_agents(PYTHONPATH=str(threads.parent))
    assert run.run() == 0
    (started,) = run.events(journal.WorkersStarted)
    assert (started.warm, started.why_cold) == (False, "the preloaded modules left 1 threads running")
    assert run.log("rank_0") == "fine\n"


LEAVES_A_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
INITIALISES_CUDA = "import torch\ntorch.cuda.is_initialized = lambda: True\n"


@pytest.mark.parametrize(
    ("module", "why_cold"),
    [
        ("", ""),
        (LEAVES_A_THREAD, "--preload mine.part: the preloaded modules left 1 threads running"),
        (INITIALISES_CUDA, "--preload mine.part: a preloaded module initialised CUDA"),
        ("import nowhere", "--preload mine.part: ModuleNotFoundError(\"No module named 'nowhere'\")"),
    ],
)
def test_ranks_begin_with_the_modules_to_preload_unless_one_spoils_the_fork(
    job: Jobs, module: str, why_cold: str
) -> None:
    script = "import sys; print(f\"{'mine.part' in sys.modules} {'mine.other' in sys.modules}\")"
    run = job(script, "--preload", "mine.part, mine.other", ranks=1)
    package = run.root / "modules" / "mine"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "part": module, "other": ""}.items():
        (package / f"{name}.py").write_text(text)
    run.environment_of_agents(PYTHONPATH=f"{run.stub_torch}:{package.parent}")
    assert run.run() == 0
    (started,) = run.events(journal.WorkersStarted)
    assert (started.warm, started.why_cold) == (not why_cold, why_cold)
    assert run.log("rank_0") == ("False False\n" if why_cold else "True True\n")


def test_an_order_to_start_ranks_may_be_longer_than_a_packet(job: Jobs) -> None:
    """64 sections with the longest names, and 200 KiB of arguments."""
    arguments = [f"{number:04d}" * 64 for number in range(800)]
    sections = ",".join(f"{'s' * 62}{number}:60" for number in range(10, 64))
    run = job(
        RANK + "print(len(sys.argv), sys.argv[-1][:4])",
        *("--section-timeouts", sections),
        ranks=4,
        arguments=arguments,
    )
    assert run.run() == 0, run.stderr
    assert run.log("rank_3") == "801 0799\n"


@pytest.mark.parametrize("warm", ["on", "off"])
def test_a_module_runs_as_with_python_m(job: Jobs, warm: str) -> None:
    options = ("--warm-start", warm, "--max-restarts", "0", "--module")
    run = job("", *options, ranks=1, arguments=["--flag", "x"])
    package = run.root / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("name = 'other'")
    (package / "train.py").write_text(
        "import sys\nfrom .other import name\n"
        "print(name, __name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0])\n"
        "raise ValueError('wrong')\n"
    )
    run.replace_script(Path("package.train"))
    assert run.run() == 1
    fresh = subprocess.run(
        [sys.executable, "-u", "-m", "package.train", "--flag", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=run.root,
        check=False,
        timeout=250,
    )
    said, expected = run.log("rank_0").splitlines(), fresh.stdout.splitlines()
    assert said[0] == expected[0]
    assert said[-3:] == expected[-3:]
    assert "nvrx_slurm" not in run.log("rank_0")


def test_a_program_of_any_kind_can_be_a_rank(job: Jobs) -> None:
    script = "echo rank $RANK of $WORLD_SIZE; exit $RANK"
    run = job("", "--max-restarts", "0", "--no-python", ranks=2, arguments=["-c", script])
    run.replace_script(Path("/bin/sh"))
    assert run.run() == 1
    assert run.log("rank_1") == "rank 1 of 2\n"
    (started, *_) = run.events(journal.WorkersStarted)
    assert (started.warm, started.why_cold) == (False, "it is not a Python program")
