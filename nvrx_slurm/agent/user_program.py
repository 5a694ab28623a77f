"""Run the user's program in this process as ``python script.py`` or ``python -m module`` would."""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

from nvrx_slurm.agent.failed_program import exit_code_of, exit_now, leave, tell_agent, write_error_file
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


def run_user_program(program: Program, *, exit_on_exception: bool = False) -> None:
    """Execute ``program`` as ``__main__``; returns when it ends well, exits with its code otherwise.

    When the main thread has failed the agent is told: threads or exit handlers can keep the process for ever.
    With ``exit_on_exception`` an exception that nobody caught ends it at once instead.

    The interpreter was started with ``-u``, so that a killed rank's last lines are not lost.
    """
    _reseed()
    rank_process = os.getpid()
    sys.argv = [program.target, *program.args]
    try:
        if program.kind is ProgramKind.MODULE:
            _look_first_in(program.cwd)
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            _look_first_in(str(Path(program.target).resolve().parent))
            _run_script(program.target)
    except SystemExit as leaving:
        code = exit_code_of(leaving)
        if code == 0 or os.getpid() != rank_process:
            # How a child ends that the program has forked is the program's business.
            raise
        if not isinstance(leaving.code, int):
            with contextlib.suppress(BaseException):
                print(leaving.code, file=sys.stderr)
        tell_agent(code)
        leave(code)
    except BaseException as error:
        _report(error)
        if os.getpid() != rank_process:
            leave(1)
        if isinstance(error, KeyboardInterrupt):
            # The interpreter runs the exit handlers, then ends by SIGINT, and has nothing to add.
            sys.excepthook = lambda *_: None
            raise
        write_error_file(error)
        if exit_on_exception:
            exit_now(1)
        tell_agent(1)
        leave(1)


def _look_first_in(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH, since Python 3.11
        sys.path.insert(0, folder)


def _run_script(script: str) -> None:
    names = {
        "__file__": script,
        "__builtins__": builtins,
        "__loader__": SourceFileLoader("__main__", script),
    }
    if sys.version_info < (3, 15):
        names["__cached__"] = None
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    main = types.ModuleType("__main__")
    main.__dict__.update(names)
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
    error = error.with_traceback(traceback)
    try:
        sys.excepthook(type(error), error, traceback)
    except Exception:
        # The program's own hook, which has failed: this is shown nevertheless.
        sys.__excepthook__(type(error), error, traceback)


def _reseed() -> None:
    """NumPy and torch seed their generators at import: ranks forked after it, and those of every later cycle,
    would all draw the same numbers. Python's own generator knows of forks.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.seed()
