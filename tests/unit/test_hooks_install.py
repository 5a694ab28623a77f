"""install-hooks and uninstall-hooks: what they write, and what they leave alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from health_world import CHECKS

from nvrx_slurm.cli.health import main
from nvrx_slurm.health.config import load_config
from nvrx_slurm.hooks import install as install_module
from nvrx_slurm.hooks.install import InstallError, hook_text, slurm_conf_lines, uninstall


@pytest.fixture
def command(tmp_path: Path) -> Path:
    path = tmp_path / "nvrx-health"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "site"


def install(prefix: Path, command: Path, limit_s: int, *, dry_run: bool = False) -> list[str]:
    """Install; return what was done, without the warning that a command of a user's own is worth."""
    steps = install_module.install(prefix, command, limit_s, dry_run=dry_run)
    return [step for step in steps if "WARNING" not in step]


def tree(directory: Path) -> dict[str, str]:
    """Everything below, and what it is."""
    return {
        str(path.relative_to(directory)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_hooks_link_and_configuration_are_written(prefix: Path, command: Path) -> None:
    install(prefix, command, 45)
    there = tree(prefix)
    assert sorted(there) == [
        "bin/nvrx-health",
        "epilog.d/50-nvrx-health",
        "health.yaml",
        "periodic.d/50-nvrx-health",
        "prolog.d/50-nvrx-health",
    ]
    assert there["bin/nvrx-health"] == str(command)
    assert "\nlimit_s=45 " in there["prolog.d/50-nvrx-health"]
    assert os.access(prefix / "prolog.d" / "50-nvrx-health", os.X_OK)
    assert (prefix / "checks.d").is_dir()


def test_the_configuration_that_is_written_is_accepted(prefix: Path, command: Path) -> None:
    install(prefix, command, 30)
    config = load_config(prefix / "health.yaml", CHECKS)
    assert config.of(CHECKS["site-scripts"]).directory == f"{prefix}/checks.d"  # type: ignore[attr-defined]


def test_twice_is_fine(prefix: Path, command: Path) -> None:
    assert len(install(prefix, command, 30)) == 6
    before = tree(prefix)
    assert install(prefix, command, 30) == []
    assert tree(prefix) == before


def test_an_older_hook_is_replaced_and_a_changed_configuration_stays(prefix: Path, command: Path) -> None:
    install(prefix, command, 30)
    (prefix / "health.yaml").write_text("budget_s: 3\n")
    hook = prefix / "epilog.d" / "50-nvrx-health"
    hook.write_text(hook_text(30) + "# older\n")
    assert install(prefix, command, 30) == [f"write {hook}"]
    assert (prefix / "health.yaml").read_text() == "budget_s: 3\n"


def test_a_dry_run_says_the_same_and_does_nothing(prefix: Path, command: Path) -> None:
    said = install(prefix, command, 30, dry_run=True)
    assert not prefix.exists()
    assert said == [f"would {step}" for step in install(prefix, command, 30)]
    would = uninstall(prefix, dry_run=True)
    assert would == [f"would {step}" for step in uninstall(prefix)]


def test_a_script_of_somebody_else_in_the_same_place_is_refused(prefix: Path, command: Path) -> None:
    (prefix / "prolog.d").mkdir(parents=True)
    (prefix / "prolog.d" / "50-nvrx-health").write_text("#!/bin/sh\n# mine\n")
    with pytest.raises(InstallError, match="is not ours"):
        install(prefix, command, 30)


def test_uninstalling_leaves_nothing(prefix: Path, command: Path) -> None:
    install(prefix, command, 30)
    assert len(uninstall(prefix)) == 5
    assert not prefix.exists()
    assert uninstall(prefix) == []


def test_uninstalling_leaves_what_the_site_has_made(prefix: Path, command: Path) -> None:
    install(prefix, command, 30)
    (prefix / "health.yaml").write_text("budget_s: 3\n")
    (prefix / "checks.d" / "20-ipmi").write_text("#!/bin/sh\n")
    (prefix / "prolog.d" / "10-quota").write_text("#!/bin/sh\n")
    uninstall(prefix)
    assert sorted(tree(prefix)) == ["checks.d/20-ipmi", "health.yaml", "prolog.d/10-quota"]


def test_slurm_conf_names_all_three(prefix: Path) -> None:
    lines = slurm_conf_lines(prefix, 30)
    assert f"Prolog={prefix}/prolog.d/*" in lines
    assert f"Epilog={prefix}/epilog.d/*" in lines
    assert f"HealthCheckProgram={prefix}/periodic.d/50-nvrx-health" in lines


@pytest.mark.parametrize("where", ["relative", "/with space"])
def test_a_prefix_that_slurm_conf_cannot_hold_is_refused(where: str, command: Path) -> None:
    with pytest.raises(InstallError, match="accepted: an absolute path without white space"):
        install(Path(where), command, 30)


def test_a_clone_of_ours_is_no_prefix(command: Path) -> None:
    """Taking the hooks away again would take the clone's own."""
    clone = Path(__file__).resolve().parents[2]
    for refused in (lambda: install(clone, command, 30), lambda: uninstall(clone)):
        with pytest.raises(InstallError, match="a clone of nvrx-slurm"):
            refused()


def test_its_own_link_can_install_it_again(prefix: Path, command: Path) -> None:
    install(prefix, command, 30)
    assert install(prefix, prefix / "bin" / "nvrx-health", 30) == []
    assert (prefix / "bin" / "nvrx-health").readlink() == command


def test_a_limit_that_leaves_no_time_is_refused(prefix: Path, command: Path) -> None:
    with pytest.raises(InstallError, match="accepted: 25s and more"):
        install(prefix, command, 5)


def test_a_slurm_in_another_place_is_noted(
    prefix: Path, command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_module.shutil, "which", lambda name: f"/opt/slurm/bin/{name}")
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/etc/slurm.conf")
    install(prefix, command, 30)
    hooks = load_config(prefix / "health.yaml", CHECKS).hooks
    assert (hooks.slurm_bin, hooks.slurm_conf) == ("/opt/slurm/bin", "/opt/slurm/etc/slurm.conf")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_command_that_others_can_change_is_warned_of(prefix: Path, command: Path) -> None:
    command.chmod(0o777)
    assert install_module.install(prefix, command, 30)[0].startswith(
        f"WARNING: {command}: others than its owner can write it"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_directories_where_others_can_exchange_what_root_runs_are_warned_of(
    tmp_path: Path, prefix: Path, command: Path
) -> None:
    prefix.mkdir()
    os.chown(prefix, 12345, 0)
    warning, *done = install_module.install(prefix / "below", command, 30, dry_run=True)
    assert warning.startswith(f"WARNING: {prefix}: it belongs to user 12345, and root will run the hooks")
    assert all(step.startswith("would ") for step in done)
    tmp_path.chmod(0o777)
    warning = install_module.install(prefix, command, 30)[0]
    assert warning.startswith(
        f"WARNING: {tmp_path}: others than its owner can write it, and root will run it"
    )


@pytest.mark.parametrize(("limit_s", "timeout_s"), [(25, 120), (30, 120), (60, 210)])
def test_slurm_ends_no_hook_before_it_ends_itself(prefix: Path, limit_s: int, timeout_s: int) -> None:
    assert f"PrologEpilogTimeout={timeout_s}" in slurm_conf_lines(prefix, limit_s)
    assert timeout_s > 3 * limit_s + 7 + 4  # an epilog, its killing, and telling the log twice


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_command_prints_the_lines_of_slurm_conf_alone_on_standard_output(
    prefix: Path, command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(command)])
    done = invoke("install-hooks", "--prefix", prefix)
    assert done.stdout.splitlines() == slurm_conf_lines(prefix, 30)
    assert "scontrol reconfigure" in done.stderr
    assert invoke("uninstall-hooks", "--prefix", prefix).exit_code == 0
    assert not prefix.exists()
