"""Run the user's program in this process as ``python script.py`` or ``python -m module`` would."""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
import types
from pathlib import Path

from nvrx_slurm.wire.messages import Program, ProgramKind


def command_line(program: Program) -> list[str]:
    """Return the command that starts ``program`` in a process of its own."""
    match program.kind:
        case ProgramKind.SCRIPT:
            return [sys.executable, "-u", program.target, *program.args]
        case ProgramKind.MODULE:
            return [sys.executable, "-u", "-m", program.target, *program.args]
        case ProgramKind.EXECUTABLE:
            return [program.target, *program.args]


def run_user_program(program: Program) -> None:
    """Execute ``program`` as ``__main__``; returns when it ends well, exits with its code otherwise.

    Output is unbuffered by line, as with ``python -u``, so that a killed rank's last lines are not lost.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    _reseed()
    sys.argv = [program.target, *program.args]
    try:
        if program.kind is ProgramKind.MODULE:
            sys.path[0] = program.cwd
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program.target).resolve().parent)
            _run_script(program.target)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _run_script(script: str) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    try:
        source = Path(script).read_bytes()
    except OSError as error:
        print(f"nvrx: cannot read {script}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    exec(compile(source, script, "exec"), main.__dict__)


def _report(error: BaseException) -> None:
    """Print the traceback without the frames that a fresh interpreter would not have."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _reseed() -> None:
    """NumPy seeds its global generator at import; ranks forked after it would all draw the same numbers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
