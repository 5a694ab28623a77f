"""Rules L1 to L18: what the doctor says about a batch script."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nvrx_slurm.cli.doctor import _launcher, _own_times
from nvrx_slurm.doctor.batch_file import (
    UnreadableScriptError,
    parse_batch_file,
    parse_time,
    read_batch_file,
)
from nvrx_slurm.doctor.findings import Finding, Status
from nvrx_slurm.doctor.lint import lint

CLONE = Path(__file__).resolve().parent.parent.parent
TEMPLATES = sorted((CLONE / "sbatch_templates").glob("*.sbatch"))
LAUNCHER = _launcher()
WARN, PROBLEM, UNKNOWN = Status.WARN, Status.PROBLEM, Status.UNKNOWN

GOOD = {
    "shebang": "#!/bin/bash",
    "nodes": "#SBATCH --nodes=5",
    "no-kill": "#SBATCH --no-kill",
    "requeue": "#SBATCH --requeue",
    "open-mode": "#SBATCH --open-mode=append",
    "signal": "#SBATCH --signal=B:USR2@120",
    "output": "#SBATCH --output=slurm-%j.out",
    "time": "#SBATCH --time=24:00:00",
    "more": "",
    "before": "set -u",
    "launch": "exec nvrx-srun --spares 1 train.py --steps 5",
    "after": "",
}


def findings(**changes: str | None) -> list[Finding]:
    """Lint the good script with lines changed; None takes one away."""
    lines = {**GOOD, **{name.replace("_", "-"): line for name, line in changes.items()}}
    text = "\n".join(line for line in lines.values() if line is not None) + "\n"
    found, _ = lint(parse_batch_file(text, LAUNCHER), _own_times(), None)
    return found


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_our_own_templates_are_clean(template: Path) -> None:
    found, ladders = lint(read_batch_file(template, LAUNCHER), _own_times(), None)
    assert found == []
    assert ladders, "the template's nvrx-srun line was not understood"


def test_a_good_script_is_clean() -> None:
    assert findings() == []


CASES = [
    ("L1", PROBLEM, {"shebang": "# no interpreter"}),
    ("L1", PROBLEM, {"nodes": "#SBATCH --nodes=5\r"}),
    ("L2", PROBLEM, {"more": '#SBATCH --job-name="open'}),
    ("L2", PROBLEM, {"more": "#SBATCH -J a stray"}),
    ("L2", PROBLEM, {"more": "#SBATCH -N5 : -N2"}),
    ("L2", WARN, {"more": "#SBATCH --spares=1"}),
    ("L3", WARN, {"after": "#SBATCH --mem=0"}),
    ("L3", WARN, {"more": " #SBATCH --mem=0"}),
    ("L3", WARN, {"more": "# SBATCH --mem=0"}),
    ("L3", WARN, {"more": "#SBATCH -J a#b"}),
    ("L3", WARN, {"more": "#SLURM -J a"}),
    ("L4", PROBLEM, {"more": '#SBATCH --comment={"a":1}'}),
    ("L4", PROBLEM, {"more": '#SBATCH --extra="{"a":1}"'}),
    ("L5", PROBLEM, {"no_kill": None}),
    ("L5", PROBLEM, {"no_kill": "#SBATCH --no-kill=off"}),
    ("L6", WARN, {"requeue": None}),
    ("L6", PROBLEM, {"requeue": "#SBATCH --no-requeue"}),
    ("L7", WARN, {"open_mode": None}),
    ("L7", PROBLEM, {"open_mode": "#SBATCH --open-mode=truncate"}),
    ("L8", WARN, {"output": "#SBATCH --output=train.log"}),
    ("L8", WARN, {"output": "#SBATCH -e %x.err"}),
    ("L9", WARN, {"more": "#SBATCH -w n[1-5]"}),
    ("L9", PROBLEM, {"more": "#SBATCH -w n[1-5] -x n3"}),
    ("L9", PROBLEM, {"more": "#SBATCH -w n[1-6]"}),
    ("L9", PROBLEM, {"more": "#SBATCH -w n[1-"}),
    ("L10", PROBLEM, {"more": "#SBATCH hetjob"}),
    ("L11", WARN, {"more": "#SBATCH --array=0-3", "output": "#SBATCH -o %A_%a.out"}),
    ("L12", WARN, {"signal": None}),
    ("L12", PROBLEM, {"signal": "#SBATCH --signal=USR2@120"}),
    ("L12", WARN, {"signal": "#SBATCH --signal=B:TERM@120"}),
    ("L12", PROBLEM, {"signal": "#SBATCH --signal=B:"}),
    ("L13", UNKNOWN, {"launch": "./run.sh"}),
    ("L13", PROBLEM, {"launch": "exec nvrx-srun --spare 1 train.py"}),
    ("L13", PROBLEM, {"launch": "exec nvrx-srun --spares one train.py"}),
    ("L13", PROBLEM, {"launch": "exec nvrx-srun --heartbeat-timeout 5x train.py"}),
    ("L13", PROBLEM, {"launch": "exec nvrx-srun --spares"}),
    ("L13", PROBLEM, {"launch": "exec nvrx-srun --spares 1"}),
    ("L14", PROBLEM, {"launch": "exec srun -N4 nvrx-srun train.py"}),
    ("L14", PROBLEM, {"launch": "exec torchrun --no-python nvrx-srun train.py"}),
    ("L15", PROBLEM, {"launch": "nvrx-srun --spares 1 train.py"}),
    ("L15", PROBLEM, {"launch": "nvrx-srun train.py", "before": "trap 'kill -USR2 $pid' USR2"}),
    ("L16", PROBLEM, {"launch": "nvrx-srun train.py | tee log", "signal": "#SBATCH --signal=B:USR1"}),
    ("L16", PROBLEM, {"launch": "exec nvrx-srun train.py || true"}),
    ("L16", PROBLEM, {"launch": "nvrx-srun train.py &", "after": "sleep 5"}),
    ("L16", WARN, {"launch": "nvrx-srun train.py", "after": "echo done"}),
    ("L17", PROBLEM, {"launch": "exec nvrx-srun --srun-arg=--kill-on-bad-exit=1 t.py"}),
    ("L17", PROBLEM, {"launch": "exec nvrx-srun --srun-arg -K t.py"}),
    ("L17", PROBLEM, {"launch": "exec nvrx-srun --srun-arg=--wait=60 t.py"}),
    ("L17", PROBLEM, {"launch": "exec nvrx-srun --srun-arg=--no-kill=off t.py"}),
    ("L17", PROBLEM, {"launch": "exec nvrx-srun --srun-arg=-N2 t.py"}),
    ("L18", PROBLEM, {"launch": "exec nvrx-srun --spares 5 t.py"}),
    ("L18", WARN, {"nodes": None}),
    ("T5", WARN, {"time": "#SBATCH -t 30"}),
    ("T11", WARN, {"launch": "exec nvrx-srun --workers-stop-timeout 5m t.py"}),
    ("T12", PROBLEM, {"time": "#SBATCH -t 2:00"}),
    ("T2", WARN, {"launch": "exec nvrx-srun --heartbeat-timeout=5m t.py"}),
]


@pytest.mark.parametrize(("rule", "status", "changes"), CASES)
def test_each_mistake_is_found(rule: str, status: Status, changes: dict[str, str | None]) -> None:
    found = [finding for finding in findings(**changes) if finding.rule == rule]
    assert [finding.status for finding in found] == [status], findings(**changes)
    assert found[0].answer.why
    assert found[0].answer.fix


@pytest.mark.parametrize(
    "changes",
    [
        {"more": "#SBATCH --comment='{\"a\": 1}'"},
        {"more": "##SBATCH --mem=0"},
        {"no_kill": "#SBATCH -k"},
        {"requeue": "#SBATCH --requeue=expedite"},
        {"output": None},
        {"output": "#SBATCH -o /dev/null"},
        {"signal": "#SBATCH --signal=RB:10"},
        {"time": None},
        {"time": "#SBATCH --time=UNLIMITED"},
        {"launch": 'exec "$HOME/bin/nvrx-srun" --spares "$SPARES" "$HOME/train.py" "$@"'},
        {"launch": "exec nvrx-srun $OPTIONS train.py", "nodes": None},
        {"launch": "exec nvrx-srun --ft-config ft.yaml train.py", "time": "#SBATCH -t 30"},
        {"launch": "exec nvrx-srun -m package.module"},
        {"launch": "exec nvrx-srun --spares=4 train.py --spares 9 --no-such"},
        {"launch": "exec nvrx-srun --srun-arg=--kill-on-bad-exit=0 t.py"},
        {
            "before": "trap 'kill -USR2 $pid' USR2",
            "launch": "nvrx-srun train.py &",
            "after": "pid=$!\nwait $pid\nwait $pid",
        },
        {"before": "echo starting nvrx-srun; module load cuda # it's needed"},
    ],
)
def test_what_is_right_is_left_alone(changes: dict[str, str | None]) -> None:
    assert findings(**changes) == []


def test_a_pipe_with_pipefail_keeps_the_exit_code() -> None:
    changes = {"before": "set -o pipefail", "launch": "nvrx-srun t.py | tee log", "signal": None}
    assert "L16" not in {finding.rule for finding in findings(**changes) if finding.status is PROBLEM}


def test_a_finding_names_its_line() -> None:
    (found,) = findings(open_mode="#SBATCH --open-mode=truncate")
    assert (found.answer.line, found.answer.text) == (5, "#SBATCH --open-mode=truncate")


def test_an_array_that_shares_a_run_directory_is_refused() -> None:
    changes = {"more": "#SBATCH -a 0-3", "output": None, "launch": "exec nvrx-srun --run-dir /data/run t.py"}
    (found,) = findings(**changes)
    assert (found.rule, found.status) == ("L11", PROBLEM)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:30:15", 5415),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:15", 217815),
        ("UNLIMITED", math.inf),
        ("soon", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"#!/bin/bash\n\0"])
def test_a_file_that_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UnreadableScriptError):
        read_batch_file(tmp_path / "x", LAUNCHER)
