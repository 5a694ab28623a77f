"""The script that slurmd runs, for real: what reaches nvrx-health, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.hooks.install import hook_text

ROOT = Path(__file__).resolve().parents[2]


class Site:
    """A prefix with the hook, and a command of the test's own in the place of nvrx-health."""

    def __init__(self, prefix: Path, limit_s: int = 30) -> None:
        self.prefix = prefix
        self.hook = prefix / "prolog.d" / "50-nvrx-health"
        for directory in ("prolog.d", "bin"):
            (prefix / directory).mkdir(parents=True)
        self.hook.write_text(hook_text(limit_s))
        self.hook.chmod(0o755)

    def command(self, body: str) -> None:
        command = self.prefix / "bin" / "nvrx-health"
        command.write_text(body)
        command.chmod(0o755)

    def run(self, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.hook], env=environ, cwd="/", capture_output=True, text=True, timeout=250, check=False
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "pre fix")


TELL = f"""#!{sys.executable} -I
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ), sys.stdin.read()]))
"""
SLURMD = {
    "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_UID": "1001",
}


def told(site: Site, **environ: str) -> tuple[list[str], dict[str, str], str]:
    site.command(TELL)
    done = site.run(**environ)
    assert done.returncode == 0, done.stderr
    argv, seen, notes = json.loads(done.stderr)
    return argv, seen, notes


def test_nothing_of_the_environment_gets_through_but_what_slurmd_sets(site: Site) -> None:
    _, seen, _ = told(
        site,
        **SLURMD,
        PATH="/tmp/evil",
        PYTHONPATH="/tmp/evil",
        PYTHONSTARTUP="/tmp/evil",
        LD_LIBRARY_PATH="/tmp/evil",
        SLURM_JOB_NAME="evil",
        IFS="7",
        HOME="/tmp/evil",
    )
    expected = {name: value for name, value in SLURMD.items() if name != "SLURM_SCRIPT_CONTEXT"}
    seen.pop("LC_CTYPE", None)  # Python's own
    assert seen == {
        **expected,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
    }


def test_it_needs_no_environment_at_all(site: Site) -> None:
    """HealthCheckProgram gets next to none."""
    argv, _, notes = told(site)
    assert argv == ["hook", "periodic", "--limit", "30s"]
    assert notes == "\0"


@pytest.mark.parametrize(
    ("context", "argv"),
    [
        ("prolog_slurmd", ["hook", "prolog", "--limit", "30s"]),
        ("epilog_slurmd", ["hook", "epilog", "--limit", "90s"]),
    ],
)
def test_slurmd_says_which_hook_it_is(site: Site, context: str, argv: list[str]) -> None:
    assert told(site, SLURM_SCRIPT_CONTEXT=context)[0] == argv


@pytest.mark.parametrize(
    "comment",
    ['{"a":"$(touch /tmp/x) `id` ${HOME} %s %d"}', "two\nlines\n", "'\"; exit 1; #", "-n", "\\0 \\n"],
)
def test_a_comment_arrives_as_it_is(site: Site, comment: str) -> None:
    notes = told(site, **SLURMD, SLURM_JOB_COMMENT=comment, SLURM_JOB_EXTRA="more")[2]
    assert notes == f"{comment}\0more"


@pytest.mark.parametrize(("code", "ends_with"), [(0, 0), (17, 1), (1, 0), (2, 0), (3, 0), (255, 0)])
def test_only_a_failed_node_fails_the_hook(site: Site, code: int, ends_with: int) -> None:
    site.command(f"#!/bin/sh\necho found it >&2\nexit {code}\n")
    done = site.run(**SLURMD)
    assert done.returncode == ends_with
    assert "found it" in done.stderr
    assert ("is broken and passes" in done.stderr) == (code not in (0, 17))


def test_a_command_that_is_not_there_passes_loudly(site: Site) -> None:
    done = site.run(**SLURMD)
    assert done.returncode == 0
    assert (
        done.stderr
        == f"nvrx-health prolog hook is broken and passes: there is no {site.prefix}/bin/nvrx-health\n"
    )


def test_an_interpreter_that_is_gone_passes_loudly(site: Site) -> None:
    site.command("#!/nowhere/python\n")
    done = site.run(**SLURMD)
    assert (done.returncode, "is broken and passes" in done.stderr) == (0, True)


def test_a_command_that_takes_too_long_is_ended_and_passes(tmp_path: Path) -> None:
    site = Site(tmp_path, limit_s=3)
    site.command(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    done = site.run(**SLURMD)
    assert done.returncode == 0
    assert "it took more than 3 s and was ended" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_command_that_cannot_be_ended_is_not_waited_for(tmp_path: Path) -> None:
    """The kernel may hold it, and with it who waits for it: here that one is stopped."""
    site = Site(tmp_path, limit_s=3)
    site.command(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nkill -STOP $PPID\nexec sleep 600\n")
    comment = "x" * 100_000
    done = site.run(**SLURMD, SLURM_JOB_COMMENT=comment, SLURM_JOB_EXTRA=comment)
    os.kill(int((tmp_path / "pid").read_text()), 9)
    assert done.returncode == 0
    assert "it was killed, or took more than 3 s and did not end" in done.stderr


def test_a_link_into_a_file_system_that_is_gone_is_not_followed_by_the_script(site: Site) -> None:
    (site.prefix / "bin" / "nvrx-health").symlink_to("/nowhere/bin/nvrx-health")
    done = site.run(**SLURMD)
    assert done.returncode == 0
    assert done.stderr.endswith(f"passes: {site.prefix}/bin/nvrx-health ended with code 127\n")


def test_what_a_check_has_left_running_does_not_hold_up_slurmd(site: Site) -> None:
    """slurmd reads the hook's output to its end: a process stuck in the kernel must not have it open."""
    site.command(f"#!/bin/sh\nsleep 60 &\necho $! > '{site.prefix}/pid'\nexit 17\n")
    done = site.run(**SLURMD)
    os.kill(int((site.prefix / "pid").read_text()), 9)
    assert done.returncode == 1


def test_it_is_found_through_a_link_from_slurms_own_directory(site: Site, tmp_path: Path) -> None:
    site.command("#!/bin/sh\nexit 17\n")
    (tmp_path / "etc" / "prolog.d").mkdir(parents=True)
    link = tmp_path / "etc" / "prolog.d" / "50-nvrx-health"
    link.symlink_to(site.hook)
    site.hook = link
    assert site.run(**SLURMD).returncode == 1


@pytest.mark.parametrize("directory", ["prolog.d", "epilog.d", "periodic.d"])
def test_the_clone_has_the_same_hooks(directory: str) -> None:
    assert (ROOT / directory / "50-nvrx-health").read_text() == hook_text(30)
    assert os.access(ROOT / directory / "50-nvrx-health", os.X_OK)
    assert (ROOT / "bin" / "nvrx-health").exists()
