"""Run the user's script in this process as ``python script.py`` would."""

from __future__ import annotations

import builtins
import os
import signal
import sys
import types
from pathlib import Path

from nvrx_slurm.wire.messages import Program


def run_user_program(program: Program) -> None:
    """Execute ``program`` as ``__main__``; returns when it ends well, exits with its code otherwise.

    Output is unbuffered by line, as with ``python -u``, so that a killed rank's last lines are not lost.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    _reseed()
    sys.argv = [program.script, *program.args]
    sys.path[0] = str(Path(program.script).resolve().parent)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=program.script, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    try:
        source = Path(program.script).read_bytes()
    except OSError as error:
        print(f"nvrx: cannot read {program.script}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    try:
        exec(compile(source, program.script, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error, program.script)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _report(error: BaseException, script: str) -> None:
    """Print the traceback without the frames of this module."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _reseed() -> None:
    """NumPy seeds its global generator at import; ranks forked after it would all draw the same numbers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
