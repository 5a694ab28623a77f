"""The configuration of hang detection: file, command line, precedence; nothing wrong is passed over (W14)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.fault_tolerance.config import (
    ConfigError,
    FaultToleranceConfig,
    build_config,
    read_config_file,
)


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ft.yaml"
    path.write_text(text)
    return path


def build(tmp_path: Path, text: str, **options: object) -> FaultToleranceConfig:
    path = file_of(tmp_path, text)
    return build_config(("command line", options), (str(path), read_config_file(path)))


def test_hang_detection_is_on_by_default() -> None:
    config = build_config()
    assert config.rank_heartbeat_timeout == 2700
    assert config.initial_rank_heartbeat_timeout == 3600
    monitored = build_config(("command line", {"rank_section_timeouts": "step:30"}))
    assert monitored.rank_out_of_section_timeout == 3600


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    config = build(
        tmp_path,
        "fault_tolerance: {rank_heartbeat_timeout: 20, safety_factor: 3}",
        rank_heartbeat_timeout=10.0,
    )
    assert (config.rank_heartbeat_timeout, config.safety_factor) == (10.0, 3.0)
    assert config.num_warmup_iterations == 5


def test_the_mapping_is_found_at_any_depth(tmp_path: Path) -> None:
    text = "trainer:\n  - plugins:\n      fault_tolerance:\n        rank_heartbeat_timeout: 5m\n"
    assert build(tmp_path, text).rank_heartbeat_timeout == 300


def test_null_switches_a_limit_off(tmp_path: Path) -> None:
    text = (
        "fault_tolerance: {rank_heartbeat_timeout: null, initial_rank_heartbeat_timeout: none, "
        "rank_section_timeouts: {step: null}, rank_out_of_section_timeout: null}"
    )
    config = build(tmp_path, text)
    assert config.rank_heartbeat_timeout is config.initial_rank_heartbeat_timeout is None
    assert config.rank_section_timeouts == {"step": None}
    assert config.rank_out_of_section_timeout is None


def test_sections_are_written_as_in_the_option_or_as_a_mapping(tmp_path: Path) -> None:
    assert build(tmp_path, "fault_tolerance: {rank_section_timeouts: 'a:1, b:none,c:d:2m'}") == build(
        tmp_path, "fault_tolerance: {rank_section_timeouts: {a: 1, b: null, 'c:d': 120}}"
    )


@pytest.mark.parametrize("key", ["workload_check_interval", "skip_section_response"])
def test_keys_that_only_say_how_are_accepted(tmp_path: Path, key: str) -> None:
    assert build(tmp_path, f"fault_tolerance: {{{key}: 5}}") == build_config()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "fault_tolerance: {rank_heartbeat_timeot: 5}",
            "unknown key 'rank_heartbeat_timeot'; accepted: init",
        ),
        ("fault_tolerance: {rank_heartbeat_timeout: -5}", "rank_heartbeat_timeout: -5: accepted: a duration"),
        ("fault_tolerance: {rank_heartbeat_timeout: yes}", "rank_heartbeat_timeout: True: accepted"),
        ("fault_tolerance: {rank_heartbeat_timeout: .nan}", "rank_heartbeat_timeout: nan: accepted"),
        ("fault_tolerance: {rank_heartbeat_timeout: 5 parsecs}", "'5 parsecs': accepted"),
        ("fault_tolerance: {rank_section_timeouts: [step]}", "rank_section_timeouts"),
        ("fault_tolerance: {rank_section_timeouts: {step: soon}}", "rank_section_timeouts"),
        ("fault_tolerance: {rank_section_timeouts: 'step'}", "step:30s"),
        ("fault_tolerance: {rank_section_timeouts: 'a:1,a:2'}", "'a' twice"),
        ("fault_tolerance: {rank_section_warmup_timeouts: {step: 5}}", "no entry in rank_section_timeouts"),
        ("fault_tolerance: {safety_factor: 0.5}", "safety_factor: 0.5: accepted: a number of 1 or more"),
        ("fault_tolerance: {safety_factor: null}", "safety_factor: None"),
        ("fault_tolerance: {num_warmup_iterations: 1.5}", "num_warmup_iterations"),
        ("fault_tolerance: {calc_ft_timeouts: maybe}", "true or false"),
        ("fault_tolerance: 3", "must be a mapping"),
        ("other: {}", "no mapping 'fault_tolerance'"),
        ("", "no mapping 'fault_tolerance'"),
        ("a: {fault_tolerance: {}}\nb: {fault_tolerance: {}}", "there are 2"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence_that_names_the_file(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, text)
    message = str(caught.value)
    assert str(tmp_path / "ft.yaml") in message
    assert says in message
    assert "\n" not in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_config_file(tmp_path / "none.yaml")


@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)
def test_no_value_in_any_place_does_anything_but_work_or_be_refused(document: object) -> None:
    for key in ("rank_heartbeat_timeout", "rank_section_timeouts", "safety_factor", "num_warmup_iterations"):
        with contextlib.suppress(ConfigError):
            build_config(("file", {key: yaml.safe_load(yaml.safe_dump(document))}))


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("max_no_progress_cycles", "null", "a whole number of 0 or more"),
        ("max_no_progress_cycles", "-1", "a whole number of 0 or more"),
        ("max_no_progress_cycles", "true", "a whole number of 0 or more"),
        ("min_progress_iterations", "0", "a whole number of 1 or more"),
        ("min_progress_iterations", "1.5", "a whole number of 1 or more"),
        ("checkpoint_iteration_file", "7", "the path of a file"),
        ("checkpoint_iteration_file", "''", "the path of a file"),
        ("max_no_progres_cycles", "3", "max_no_progress_cycles"),
    ],
)
def test_w14_a_bad_bound_in_the_file_is_refused_and_not_replaced_by_a_default(
    tmp_path: Path, key: str, value: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        build(tmp_path, f"fault_tolerance: {{{key}: {value}}}")
    assert key in str(refused.value)
    assert accepted in str(refused.value)


def test_w14_the_bound_on_progress_is_on_by_default_and_null_is_no_file(tmp_path: Path) -> None:
    config = build(tmp_path, "fault_tolerance: {checkpoint_iteration_file: null}")
    assert (config.max_no_progress_cycles, config.min_progress_iterations) == (3, 1)
    assert config.checkpoint_iteration_file is None
