"""The options of sbatch(1), 22.05 to 25.11: enough to read a batch script as sbatch does."""

from __future__ import annotations

import enum


class Takes(enum.Enum):
    """Whether an option has a value."""

    NOTHING = enum.auto()
    VALUE = enum.auto()
    MAYBE = enum.auto()
    """Only joined to it: ``--exclusive=user``, ``-koff``."""


_NOTHING = """
    contiguous help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot spread-job
    test-only usage use-min-nodes verbose version wait consolidate-segments spread-segments external
    stepmgr disable-stdout-job-summary
"""
_MAYBE = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
_VALUE = """
    account acctg-freq admin-comment array batch bb bbf begin bell chdir cluster-constraint clusters comment
    constraint container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task
    deadline delay-boot dependency distribution error exclude export export-file extra extra-node-info
    gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input
    job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
    ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority profile qos
    reservation resources segment signal sockets-per-node switches thread-spec threads-per-core time
    time-min tmp tres-bind tres-per-job tres-per-task uid wait-all-nodes wckey workdir wrap
"""
LONG: dict[str, Takes] = {
    **dict.fromkeys(_NOTHING.split(), Takes.NOTHING),
    **dict.fromkeys(_MAYBE.split(), Takes.MAYBE),
    **dict.fromkeys(_VALUE.split(), Takes.VALUE),
}
SHORT: dict[str, str] = {
    "A": "account",
    "a": "array",
    "B": "extra-node-info",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "h": "help",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "O": "overcommit",
    "o": "output",
    "p": "partition",
    "Q": "quiet",
    "q": "qos",
    "S": "core-spec",
    "s": "oversubscribe",
    "t": "time",
    "V": "version",
    "v": "verbose",
    "W": "wait",
    "w": "nodelist",
    "x": "exclude",
}


def long_option(typed: str) -> str | None:
    """Return the option that ``typed`` is, or is an unambiguous beginning of, as getopt_long does."""
    if typed in LONG:
        return typed
    candidates = [name for name in LONG if name.startswith(typed)]
    return candidates[0] if len(candidates) == 1 else None
