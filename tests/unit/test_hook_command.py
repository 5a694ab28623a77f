"""``nvrx-health hook`` as a process of its own, in the odd surroundings that a hook may find itself in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NVRX_HEALTH = str(Path(sys.executable).with_name("nvrx-health"))
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as a hook has it")

_SCONTROL = """#!/bin/sh
echo "$*" >> "${0%/*}/orders"
[ "$3" != nodes ] || echo "NodeName=n1 State=IDLE Partitions=batch"
[ "$2" != config ] || echo "Configuration of $SLURM_CONF as of $(date +%Y-%m-%dT%H:%M:%S)"
[ "$3" != job ] || echo "JobId=7 JobName=x"
"""


class Site:
    """A configuration, a script of the site that finds a fault, and a scontrol that notes its orders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for directory in ("checks.d", "slurm"):
            (root / directory).mkdir()
        self.script("slurm/scontrol", _SCONTROL)
        self.script("checks.d/fan", "#!/bin/sh\necho the fan is off\nexit 2\n")
        self.configure("")

    def script(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)
        (self.root / name).chmod(0o755)

    def configure(self, more: str) -> None:
        (self.root / "health.yaml").write_text(
            f"state_dir: {self.root}/lib/nvrx/health\nhooks: {{slurm_bin: {self.root}/slurm}}\n"
            f"checks:\n  site-scripts: {{directory: {self.root}/checks.d}}\n{more}"
        )

    def hook(
        self, stage: str, *before: str, stderr: int | None = subprocess.PIPE
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, NVRX_HEALTH, "hook", stage, "--config", str(self.root / "health.yaml")],
            env={"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            timeout=250,
            check=False,
            umask=0,
        )

    @property
    def orders(self) -> list[str]:
        """What was said to scontrol, without the questions."""
        said = (self.root / "slurm" / "orders").read_text().splitlines()
        return [line for line in said if not line.startswith("-o show")]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_what_a_hook_remembers_nobody_else_reads_or_changes(site: Site) -> None:
    (site.root / "checks.d" / "fan").unlink()
    assert site.hook("prolog").returncode == 0
    made = [site.root / "lib", *sorted((site.root / "lib").rglob("*"))]
    assert made[-1].name == "baseline.json"
    assert [path.name for path in made if path.stat().st_mode & 0o077] == []


def test_the_controllers_clock_is_asked_of_the_slurm_that_the_site_has(site: Site) -> None:
    config = site.root / "health.yaml"
    config.write_text(config.read_text().replace("/slurm}", "/slurm, slurm_conf: /opt/slurm.conf}"))
    done = subprocess.run(
        [NVRX_HEALTH, "check", "--only", "clock", "--config", config],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout.startswith("OK clock: agrees with the controller's"), done.stdout
    assert "show config" in (site.root / "slurm" / "orders").read_text()


def assert_drained(site: Site, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 17, done.stderr
    drain, requeue, start = site.orders
    assert drain.startswith("update NodeName=n1 State=DRAIN Reason=nvrx:site-scripts:script-fan:repair ")
    assert (requeue, start) == ("requeue 7", "update JobId=7 StartTime=now+10")


def test_a_log_that_is_full_keeps_no_node_from_being_drained(site: Site) -> None:
    with Path("/dev/full").open("w") as full:
        assert_drained(site, site.hook("prolog", stderr=full.fileno()))


def test_a_caller_that_ignores_the_end_of_children_breaks_nothing(site: Site) -> None:
    assert_drained(site, site.hook("prolog", "env", "--ignore-signal=CHLD"))
