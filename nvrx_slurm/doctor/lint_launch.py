"""L13 to L19: how a batch script runs nvrx-srun."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from nvrx_slurm.doctor.batch_file import BatchFile, JobSignal
from nvrx_slurm.doctor.findings import Answer, Rules, problem, unknown, warn
from nvrx_slurm.doctor.launch import Launch
from nvrx_slurm.doctor.timeouts import JobTimes

LAUNCH = Rules[BatchFile]()
_LAUNCHERS = ("srun", "mpirun", "mpiexec", "torchrun", "ft_launcher", "ibrun")
_ZERO_ONLY = ("-K", "--kill-on-bad-exit", "-W", "--wait")
_OURS = re.compile(r"(--nodes|--ntasks(-per-node)?|--nodelist|--exclude|-[NnwxF])(=|\d|$)")


def _at(file: BatchFile, launch: Launch, what: str, why: str, fix: str) -> Answer:
    return problem(what, why, fix, line=launch.command.line, text=file.line_text(launch.command.line))


@LAUNCH.rule("L13", "an nvrx-srun line")
def launch_line(file: BatchFile) -> Iterator[Answer]:
    if not file.launches:
        why = "the script does not call nvrx-srun itself; what it calls was not looked into"
        yield unknown(
            "none found", why, "call nvrx-srun in the batch script, as its last line: exec nvrx-srun …"
        )
    for launch in file.launches:
        for what in launch.refused:
            why = "nvrx-srun refuses the line when the job starts, after its whole time in the queue"
            yield _at(file, launch, what, why, "nvrx-srun --help")


@LAUNCH.rule("L14", "nvrx-srun once per job")
def launched_once(file: BatchFile) -> Iterator[Answer]:
    for launch in file.launches:
        outer = next((word for word in launch.before if word.rpartition("/")[2] in _LAUNCHERS), None)
        if outer is not None:
            why = f"{outer} starts one nvrx-srun per task, and all of them claim the same job"
            yield _at(
                file, launch, f"within {outer}", why, "exec nvrx-srun …, without it: it starts its own srun"
            )


@LAUNCH.rule("L15", "who gets the signal")
def signal_reaches_launcher(file: BatchFile) -> Iterator[Answer]:
    signal = file.signal
    if signal is None or not signal.to_shell:
        return
    traps = [c for c in file.commands if c.plain[0] == "trap" and _traps(c.plain, signal)]
    waits = any(command.plain[0] == "wait" for command in file.commands)
    for launch in file.launches:
        if launch.is_exec or (traps and launch.background and waits):
            continue
        if not traps:
            why = f"the shell gets SIG{signal.name}, has no handler and dies of it: the job ends unsaved"
        else:
            why = "a shell runs its trap only when the command in the foreground has ended: too late"
        yield _at(file, launch, "the shell does", why, "exec nvrx-srun …, as the last command")


def _traps(words: object, signal: JobSignal) -> bool:
    assert isinstance(words, list | tuple)
    return any(word.upper().removeprefix("SIG") == signal.name for word in words[2:])


@LAUNCH.rule("L16", "the job's exit code")
def exit_code_survives(file: BatchFile) -> Iterator[Answer]:
    settings = [word for command in file.commands if command.plain[0] == "set" for word in command.plain[1:]]
    pipefail = "pipefail" in settings
    errexit = "errexit" in settings or any(re.fullmatch(r"-[a-z]*e[a-z]*", word) for word in settings)
    for launch in file.launches:
        after = file.commands[file.commands.index(launch.command) + 1 :]
        answer = _lost_exit_code(file, launch, [c.plain[0] for c in after], pipefail=pipefail)
        if answer is not None:
            yield answer
        elif not launch.is_exec and not errexit and _ends_otherwise([c.plain[0] for c in after]):
            why = "the job's exit code is that of the last command: a failed training can look like a success"
            line = launch.command.line
            text = file.line_text(line)
            yield warn(
                "commands follow",
                why,
                "set -e, or: nvrx-srun …; code=$?; …; exit $code",
                line=line,
                text=text,
            )


def _lost_exit_code(file: BatchFile, launch: Launch, after: list[str], *, pipefail: bool) -> Answer | None:
    match launch.command.ended_by:
        case "|" | "|&" if not pipefail:
            why = "the exit code is the last one of the pipe: a failed training looks like a success"
            return _at(
                file, launch, "in a pipe", why, "set -o pipefail; or no pipe: logs are in the run directory"
            )
        case "||" if after and after[0] in ("true", ":"):
            why = "a failed training looks like a success"
            return _at(file, launch, f"|| {after[0]}", why, f"drop || {after[0]}")
        case "&" if "wait" not in after:
            why = "the script ends at once, and Slurm kills what it left in the background"
            return _at(file, launch, "in the background", why, "exec nvrx-srun …, without &")
    return None


def _ends_otherwise(after: list[str]) -> bool:
    return bool(after) and after[-1] not in ("exit", "wait", "exec")


@LAUNCH.rule("L17", "--srun-arg")
def srun_arguments(file: BatchFile) -> Iterator[Answer]:
    for launch in file.launches:
        for argument in map(str, launch.given.get("srun_args", ())):
            name, _, value = argument.partition("=")
            why = ""
            if name in _ZERO_ONLY and value != "0":
                why = "one rank or node that ends makes Slurm kill all others: nothing is left to restart"
            elif argument.lower() in ("--no-kill=off", "--no-kill=no"):
                why = "Slurm ends the step when one of its nodes dies"
            elif _OURS.match(argument):
                why = "nvrx-srun starts one agent on every node of the job by itself; this starts others"
            if why:
                yield _at(file, launch, argument, why, "drop it")


@LAUNCH.rule("L18", "--spares")
def spares(file: BatchFile) -> Iterator[Answer]:
    number = file.num_nodes
    for launch in file.launches:
        wanted = launch.value("spares", file.launcher)
        if not isinstance(wanted, int) or wanted == 0:
            continue
        if number is None:
            line = launch.command.line
            why = "without --nodes a job gets one node, unless the sbatch command says more"
            fix = f"#SBATCH --nodes={wanted + 1} or more"
            yield warn("--nodes is missing", why, fix, line=line, text=file.line_text(line))
        elif wanted >= number:
            why = f"{wanted} of {number} nodes leave none to train on: nvrx-srun refuses it"
            yield _at(
                file,
                launch,
                f"--spares {wanted}",
                why,
                f"--spares {max(number - 1, 0)} at most, or more --nodes",
            )


def job_times(file: BatchFile, launch: Launch) -> JobTimes:
    """Return the time-outs that the script sets."""

    def limit(name: str) -> float | None:
        by_file = "ft_config" in launch.given or "ft_config" in launch.open
        if not launch.knows(name) or (by_file and name not in launch.given):
            return None
        value = launch.value(name, file.launcher)
        # nvrx-srun's "none" is no limit.
        return value if isinstance(value, float) else math.inf

    signal = file.signal
    return JobTimes(
        heartbeat_s=limit("heartbeat_timeout"),
        initial_heartbeat_s=limit("initial_heartbeat_timeout"),
        workers_stop_s=limit("workers_stop_timeout"),
        time_limit_s=file.time_limit_s,
        signal_s=None if signal is None or file.time_limit_s is None else float(signal.notice_s),
    )
