"""L1 to L12: what a batch script asks sbatch for."""

from __future__ import annotations

import json
from collections.abc import Iterator

from nvrx_slurm.doctor.batch_file import BatchFile
from nvrx_slurm.doctor.findings import Answer, Rules, problem, warn
from nvrx_slurm.doctor.words import count, node_list
from nvrx_slurm.slurm import HostlistError, expand_hostlist
from nvrx_slurm.slurm.batch_script import SbatchOption

DIRECTIVES = Rules[BatchFile]()
_JSON_OPTIONS = ("comment", "extra", "admin-comment")


@DIRECTIVES.rule("L1", "a script that sbatch accepts")
def accepted_file(file: BatchFile) -> Iterator[Answer]:
    first = file.script.lines[0] if file.script.lines else ""
    if not first.startswith("#!"):
        why = "sbatch refuses a script that does not name its interpreter in the first line"
        yield problem("no #! line", why, "begin the file with: #!/bin/bash", line=1, text=first)
    if file.dos_line_breaks:
        why = "sbatch refuses a script with DOS line breaks (\\r\\n)"
        yield problem("DOS line breaks", why, "dos2unix FILE, or: sed -i 's/\\r$//' FILE")


@DIRECTIVES.rule("L2", "options that sbatch accepts")
def accepted_options(file: BatchFile) -> Iterator[Answer]:
    for trouble in file.script.refused:
        yield problem(
            trouble.what,
            "sbatch refuses the script",
            "quote values that hold spaces; every option begins with a dash",
            line=trouble.line,
            text=trouble.text,
        )
    for trouble in file.script.unknown:
        yield warn(
            f"{trouble.what} is no option of sbatch",
            "sbatch refuses the script, unless a plug-in of the site adds this option",
            "sbatch --help; options of nvrx-srun belong to the nvrx-srun line",
            line=trouble.line,
            text=trouble.text,
        )


@DIRECTIVES.rule("L3", "lines that Slurm ignores")
def ignored_lines(file: BatchFile) -> Iterator[Answer]:
    for trouble in file.script.ignored:
        yield warn(
            trouble.what,
            "Slurm ignores the line without a word",
            "write #SBATCH in the first column, above the first command; to switch it off: ##SBATCH",
            line=trouble.line,
            text=trouble.text,
        )
    for trouble in file.script.cut:
        yield warn(
            f"a # ends the line after {trouble.what!r}",
            "for sbatch, a # begins a comment even within a word",
            "quote the value",
            line=trouble.line,
            text=trouble.text,
        )
    for trouble in file.script.old_magic:
        why = "deprecated since long: sbatch warns, and may stop reading it"
        yield warn("#SLURM", why, "write #SBATCH", line=trouble.line, text=trouble.text)


@DIRECTIVES.rule("L4", "JSON keeps its quotes")
def quoted_json(file: BatchFile) -> Iterator[Answer]:
    for option in file.script.options:
        value = (option.value or "").strip()
        if option.name not in _JSON_OPTIONS or not value.startswith(("{", "[")):
            continue
        try:
            json.loads(value)
        except ValueError:
            why = f"sbatch removes the quotes and stores {value}: who reads the {option.name} finds no JSON"
            fix = f"single quotes around it: --{option.name}='{{\"key\": 1}}'"
            yield problem("no JSON any more", why, fix, line=option.line, text=option.text)


def _on(option: SbatchOption, what: str, why: str, fix: str) -> Answer:
    return problem(what, why, fix, line=option.line, text=option.text)


@DIRECTIVES.rule("L5", "--no-kill")
def no_kill(file: BatchFile) -> Answer | None:
    option = file.option("no-kill")
    if option is None:
        why = "Slurm ends the whole job when one of its nodes dies: a spare cannot help"
        return problem("missing", why, "#SBATCH --no-kill")
    if option.value is not None and option.value.lower() in ("off", "no"):
        return _on(option, "off", "Slurm ends the whole job when one of its nodes dies", "#SBATCH --no-kill")
    return None


@DIRECTIVES.rule("L6", "--requeue")
def requeue(file: BatchFile) -> Answer | None:
    option = file.option("requeue", "no-requeue")
    if option is None:
        why = "whether a job that lost too many nodes starts again is left to the site (JobRequeue)"
        return warn("missing", why, "#SBATCH --requeue")
    if option.name == "no-requeue":
        why = "a job that has lost too many nodes exits with 75 and is over"
        return _on(option, "--no-requeue", why, "#SBATCH --requeue")
    return None


@DIRECTIVES.rule("L7", "--open-mode")
def open_mode(file: BatchFile) -> Answer | None:
    option = file.option("open-mode")
    if option is None:
        why = "a requeued job truncates its output file, unless the site says otherwise (JobFileAppend)"
        return warn("missing", why, "#SBATCH --open-mode=append")
    if not (option.value or "").lower().startswith("a"):
        why = "a requeued job truncates its output file: why it was requeued is gone"
        return _on(option, option.value or "", why, "#SBATCH --open-mode=append")
    return None


@DIRECTIVES.rule("L8", "--output, --error")
def output_files(file: BatchFile) -> Iterator[Answer]:
    array = file.option("array") is not None
    for name in ("output", "error"):
        option = file.option(name)
        value = "" if option is None else option.value or ""
        if option is None or value.startswith("/dev/"):
            continue
        if not any(mark in value for mark in ("%j", "%J", "%A")):
            why = "two jobs from this script write into one file"
            fix = f"put %j into it: --{name}=slurm-%j.out"
            yield warn(f"{value} has no %j", why, fix, line=option.line, text=option.text)
        elif array and "%A" in value and "%a" not in value:
            why = "all elements of the array write into one file"
            yield warn("%A without %a", why, f"--{name}=slurm-%A_%a.out", line=option.line, text=option.text)


@DIRECTIVES.rule("L9", "-w and -x")
def node_choice(file: BatchFile) -> Iterator[Answer]:
    wanted, excluded = file.option("nodelist"), file.option("exclude")
    if wanted is None:
        return
    names = _hosts(wanted)
    if names is None:
        yield _on(wanted, f"{wanted.value}", "this is no host list: sbatch refuses it", "-w n[1-4]")
        return
    both = set(names) & set(_hosts(excluded) or ()) if excluded is not None else set()
    if both:
        why = "the job requires and excludes the same nodes: it never starts"
        yield _on(wanted, node_list(both), why, "take them out of -w or -x")
    number = file.num_nodes
    if number is not None and len(names) > number:
        why = f"-w names {count(len(names), 'node')}, --nodes={number} asks for fewer: sbatch refuses it"
        yield _on(wanted, f"{len(names)} > {number}", why, "--nodes=" + str(len(names)))
    elif not both:
        why = (
            "a requeue can never leave a required node out: if one of them breaks, the job waits for it, and "
            "spares that are named here fail with it"
        )
        fix = "drop -w, or ask for a property of the nodes: --constraint"
        yield warn(node_list(names), why, fix, line=wanted.line, text=wanted.text)


def _hosts(option: SbatchOption | None) -> list[str] | None:
    try:
        return expand_hostlist(option.value or "") if option is not None else None
    except HostlistError:
        return None


@DIRECTIVES.rule("L10", "heterogeneous jobs")
def heterogeneous(file: BatchFile) -> Iterator[Answer]:
    for trouble in file.script.components:
        why = "losing a node of a heterogeneous job was never tried; nvrx-srun sees the first component only"
        fix = "one component: ask for all nodes in one --nodes"
        yield problem("a second component", why, fix, line=trouble.line, text=trouble.text)


@DIRECTIVES.rule("L11", "job arrays")
def array_jobs(file: BatchFile) -> Iterator[Answer]:
    option = file.option("array")
    if option is None:
        return
    for launch in file.launches:
        if launch.given.get("run_dir"):
            why = "all elements of the array claim one run directory: all but one are refused"
            fix = "leave --run-dir out, or put $SLURM_JOB_ID into it"
            line = launch.command.line
            yield problem("--run-dir for all elements", why, fix, line=line, text=file.line_text(line))
            return
    why = "each element is a job by itself: own run directory, own restarts, own requeue"
    fix = "nothing, if that is meant; a chain of jobs is --dependency=singleton"
    yield warn(f"--array={option.value}", why, fix, line=option.line, text=option.text)


@DIRECTIVES.rule("L12", "--signal")
def job_signal(file: BatchFile) -> Answer | None:
    option = file.option("signal")
    if option is None:
        why = "at the time limit ranks are killed without having been asked to save"
        return warn("missing", why, "#SBATCH --signal=B:USR2@120")
    signal = file.signal
    if signal is None:
        return _on(option, f"{option.value}", "sbatch does not understand it", "#SBATCH --signal=B:USR2@120")
    if not signal.to_shell:
        why = f"without B: SIG{signal.name} goes to every process of the steps: it kills agents and ranks"
        return _on(option, f"{option.value}", why, f"--signal=B:{signal.name}@{signal.notice_s}")
    if signal.name not in ("USR1", "USR2"):
        why = "nvrx-srun asks ranks to save at SIGUSR1 or SIGUSR2; at SIGTERM it stops them"
        fix = f"--signal=B:USR2@{signal.notice_s}"
        return warn(f"SIG{signal.name}", why, fix, line=option.line, text=option.text)
    return None
