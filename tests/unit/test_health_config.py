"""The configuration: what is accepted, and what an error says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from health_world import CHECKS

from nvrx_slurm.health import config
from nvrx_slurm.health.config import ConfigError, HealthConfig, load_config, parse_config
from nvrx_slurm.health.registry import Settings
from nvrx_slurm.health.report import UnknownCheckError, select
from nvrx_slurm.health.stage import Stage


def parsed(text: str) -> HealthConfig:
    return parse_config(text, "health.yaml", CHECKS)


def test_a_default_file_that_cannot_be_looked_for_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "DEFAULT_PATH", Path("/", "x" * 300))
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load_config(None, CHECKS)


def test_an_empty_file_means_the_defaults() -> None:
    assert parsed("") == HealthConfig()


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_can_be_switched_off_on_and_to_warnings(name: str) -> None:
    check = CHECKS[name]
    for text, mode in (("off", "off"), ("on", "on"), ("warn-only", "warn-only"), ("{mode: off}", "off")):
        assert parsed(f"checks: {{{name}: {text}}}").of(check).mode == mode
    assert parsed(f"checks: {{{name}: {{timeout_s: 3, strikes: 4}}}}").of(check).strikes == 4


@pytest.mark.parametrize("name", CHECKS)
def test_every_default_is_itself_accepted(name: str) -> None:
    import msgspec

    defaults = CHECKS[name].defaults
    assert msgspec.convert(msgspec.to_builtins(defaults), CHECKS[name].settings) == defaults
    assert isinstance(defaults, Settings)


def test_thresholds_are_read() -> None:
    config = parsed(
        "budget_s: 3\nstate_dir: /x\nchecks:\n  gpu-count: {expected: 8}\n  mounts: {expected: {/s: lustre}}"
    )
    assert (config.budget_s, config.state_dir) == (3.0, Path("/x"))
    assert config.of(CHECKS["gpu-count"]).expected == 8  # type: ignore[attr-defined]
    assert config.of(CHECKS["mounts"]).expected == {"/s": "lustre"}  # type: ignore[attr-defined]


# Each list holds the one before ten times: written out it would be ten billion words.
_BOMB = "\n".join(
    ["budget_s:", "  - &a0 [x, x]", *(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chekcs: {}", "health.yaml: unknown key 'chekcs'; did you mean checks? accepted: budget_s, job"),
        ("checks: {gpu-cuont: off}", "unknown key 'gpu-cuont'; did you mean gpu-count?"),
        ("checks: {gpu-count: {expcted: 8}}", "checks: gpu-count: unknown key 'expcted'"),
        ("checks: {gpu-count: {expected: many}}", "checks: gpu-count: expected: expected `int | null`"),
        ("checks: {gpu-count: {strikes: 0}}", "checks: gpu-count: strikes: expected `int` >= 1"),
        ("checks: {gpu-count: {timeout_s: .inf}}", "checks: gpu-count: timeout_s: expected `float` <= 600"),
        ("checks: {gpu-count: sometimes}", "checks: gpu-count: mode: invalid enum value 'sometimes'"),
        ("checks: {gpu-count: 7}", "checks: gpu-count: a mapping is needed, not 7"),
        ("checks: [gpu-count]", "health.yaml: checks: a mapping is needed"),
        ("budget_s: soon", "budget_s: 'soon': accepted: seconds above 0, 3600 at most"),
        ("job_interval_s: 0", "job_interval_s: 0: accepted"),
        ("budget_s: .nan", "budget_s: nan: accepted"),
        ("budget_s: -1", "budget_s: -1: accepted"),
        ("state_dir: here", "state_dir: 'here': accepted: an absolute path"),
        ("- a", "health.yaml: a mapping is needed"),
        ("a: [", "health.yaml: not YAML"),
        ("checks: {memory: off}\nchecks: {}", "health.yaml: not YAML: checks is there twice, line 2"),
        ("checks:\n  edac: off\n  edac: {}", "not YAML: edac is there twice, line 3"),
        (f"checks: {'[' * 300}", "health.yaml: not YAML"),
        (_BOMB, "budget_s: [['x', 'x'"),
        ("a: !!python/object/apply:os.system [x]", "health.yaml: not YAML"),
    ],
)
def test_bad_input_gets_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.yaml", CHECKS)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone is careful")
def test_root_obeys_no_file_that_others_can_write(tmp_path: Path) -> None:
    file = tmp_path / "health.yaml"
    file.write_text("")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="others than its owner can write it"):
        load_config(file, CHECKS)
    file.chmod(0o600)
    os.chown(file, 12345, 0)
    with pytest.raises(ConfigError, match="it belongs to user 12345"):
        load_config(file, CHECKS)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone is careful")
def test_root_obeys_no_file_whose_directory_others_can_write(tmp_path: Path) -> None:
    directory = tmp_path / "nvrx"
    directory.mkdir()
    (directory / "health.yaml").write_text("")
    (tmp_path / "link.yaml").symlink_to("nvrx/health.yaml")
    for owner, mode in ((12345, 0o755), (0, 0o775)):
        os.chown(directory, owner, 0)
        directory.chmod(mode)
        for path in (directory / "health.yaml", tmp_path / "link.yaml"):
            with pytest.raises(ConfigError, match=r"not used: of its directory .*nvrx, "):
                load_config(path, CHECKS)
    directory.chmod(0o1777)
    assert load_config(tmp_path / "link.yaml", CHECKS) == HealthConfig()


def test_what_is_no_file_of_a_bearable_size_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    huge = tmp_path / "huge"
    huge.touch(0o600)
    os.truncate(huge, 1 << 40)
    for path, why in (("/dev/zero", "no file"), (tmp_path / "fifo", "no file"), (huge, "accepted: 1 MiB")):
        with pytest.raises(ConfigError, match=f"cannot be read: .*{why}"):
            load_config(Path(path), CHECKS)


def test_a_stage_runs_its_checks_and_none_that_is_off() -> None:
    config = parsed("checks: {gpu-ecc: off}")
    names = [check.name for check in select(CHECKS, Stage.RESTART, config)]
    assert "gpu-lost" in names
    assert "gpu-ecc" not in names
    assert "clock" not in names, "hooks and jobs do not call Slurm"
    assert not [name for name in names if CHECKS[name].opt_in]


def test_a_check_that_is_named_runs_at_any_stage_unless_it_is_off() -> None:
    names = [check.name for check in select(CHECKS, Stage.PROLOG, HealthConfig(), ["clock", "clock"])]
    assert names == ["clock"]
    assert select(CHECKS, Stage.PROLOG, parsed("checks: {clock: off}"), ["clock"]) == []
    with pytest.raises(UnknownCheckError, match="there is no check 'nope'; there are clock, devices"):
        select(CHECKS, Stage.PROLOG, HealthConfig(), ["nope"])


def test_what_hooks_do_is_read() -> None:
    hooks = parsed("hooks: {brake_share: 0.5, deep_checks: [edac, gpu-probe], clean_up: off}").hooks
    assert (hooks.brake_share, hooks.deep_checks, hooks.clean_up) == (0.5, ("edac", "gpu-probe"), False)
    assert parsed("hooks:").hooks == HealthConfig().hooks


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{brake: 0.5}", "hooks: unknown key 'brake'; did you mean brake_share"),
        ("{brake_share: 0}", "hooks: brake_share: expected `float` > 0"),
        ("{brake_share: 1.5}", "hooks: brake_share: expected `float` <= 1"),
        ("{deep_checks: [gpu-prob]}", "hooks: deep_checks: unknown check 'gpu-prob'"),
        ("{clean_up: maybe}", "hooks: clean_up: expected `bool`"),
        ("{clean_up_from_uid: 0}", "hooks: clean_up_from_uid: expected `int` >= 1"),
        ("{slurm_bin: bin}", "hooks: slurm_bin: expected `str` matching"),
        ("[]", "hooks: a mapping is needed"),
    ],
)
def test_what_hooks_cannot_do_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        parsed(f"hooks: {text}")
