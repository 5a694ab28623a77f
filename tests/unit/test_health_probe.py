"""The check that makes the GPUs work: its verdicts, and what it says where there is nothing to work on."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import msgspec
import pytest
from health_world import CHECKS, run, status

from nvrx_slurm.health.checks.gpu_probe import GpuProbeSettings, Measured, judge
from nvrx_slurm.health.config import HealthConfig, parse_config
from nvrx_slurm.health.programs import Finished, RealPrograms
from nvrx_slurm.health.report import select
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.testing.health import FakeNvml, FakePrograms, fake_node


def gpus(count: int = 8) -> list[Measured]:
    total = count * (count + 1) / 2 if count > 1 else None
    return [Measured(n, 600.0 + n, 2800.0, 12345, "H100", total) for n in range(count)]


def found(measured: list[Measured]) -> list[tuple[str, str]]:
    return [(r.status.value, r.scope) for r in judge(measured, GpuProbeSettings())]


def changed(measured: list[Measured], gpu: int, **fields: object) -> list[Measured]:
    return [msgspec.structs.replace(one, **fields) if one.gpu == gpu else one for one in measured]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_equal_gpus_are_ok(count: int) -> None:
    assert found(gpus(count)) == [("ok", "node")]


def test_a_gpu_that_computes_something_else_fails() -> None:
    assert found(changed(gpus(), 3, checksum=1)) == [("fail", "gpu 3")]


def test_of_two_gpus_that_disagree_nobody_knows_which_is_right() -> None:
    assert found(changed(gpus(2), 1, checksum=1)) == [("warn", "node")]


def test_gpus_of_different_models_need_not_agree() -> None:
    assert found(changed(gpus(2), 1, checksum=1, model="L4")) == [("ok", "node")]


def test_a_wrong_sum_fails() -> None:
    assert found(changed(gpus(), 5, all_reduce=35.0)) == [("fail", "gpu 5")]


@pytest.mark.parametrize(("what", "usual"), [("tflops", 603.5), ("gbps", 2800.0)])
def test_a_slow_gpu_warns_and_a_very_slow_one_fails(what: str, usual: float) -> None:
    assert found(changed(gpus(), 2, **{what: 0.85 * usual})) == [("warn", "gpu 2")]
    assert found(changed(gpus(), 2, **{what: 0.7 * usual})) == [("fail", "gpu 2")]


def test_it_runs_only_where_it_is_asked_for() -> None:
    def names(config: HealthConfig, *only: str) -> list[str]:
        return [check.name for check in select(CHECKS, Stage.PERIODIC, config, only)]

    assert "gpu-probe" not in names(HealthConfig())
    assert names(HealthConfig(), "gpu-probe") == ["gpu-probe"]
    assert "gpu-probe" in names(parse_config("checks: {gpu-probe: on}", "x", CHECKS))


def test_who_else_is_at_work_is_not_measured_for_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one job accuses the node, and another one keeps a GPU busy while root looks closer."""
    nvml, programs = FakeNvml(8), FakePrograms()
    node = fake_node(tmp_path, nvml, programs=programs, stage=Stage.EPILOG)
    slow = Finished(0, msgspec.json.encode(changed(gpus(), 2, tflops=1.0)).decode())
    programs.answers[sys.executable] = slow
    assert [r.status.value for r in run("gpu-probe", node)] == ["fail"]

    def comes_meanwhile(*_: object) -> Finished:
        nvml.gpus[2].processes.append(4711)
        return slow

    with monkeypatch.context() as later:
        later.setattr(programs, "run", comes_meanwhile)
        assert [r.status.value for r in run("gpu-probe", node)] == ["warn"]
    assert [r.evidence for r in run("gpu-probe", node)] == [
        "process 4711 is on gpu 2: it would be measured, too"
    ]
    nvml.gpus[2].processes.clear()
    node.tree.write("/proc/7/status", "Name:\tslurmstepd\nUid:\t0\t0\t0\t0\n")
    node.tree.write("/proc/7/cmdline", "slurmstepd: [8.batch]")
    assert [r.evidence for r in run("gpu-probe", node)] == [
        "another job runs here: it would be measured, too"
    ]


def test_without_a_gpu_it_is_skipped_with_the_reason(tmp_path: Path) -> None:
    assert status("gpu-probe", fake_node(tmp_path)) == "skip"
    assert status("gpu-probe", fake_node(tmp_path, FakeNvml(0))) == "skip"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there may be a GPU")
def test_the_work_itself_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    (result,) = run("gpu-probe", fake_node(tmp_path, FakeNvml(1), programs=RealPrograms()))
    assert (result.status.value, result.evidence) == ("skip", "torch sees no GPU")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Finished(0, json.dumps([{"gpu": 0, "tflops": 1, "gbps": 1, "checksum": 1, "model": "x"}])), "ok"),
        (Finished(1, "", "RuntimeError: CUDA out of memory"), "warn"),
        (Finished(-9, ""), "warn"),
        (Finished(0, "[]"), "ok"),
        (UnavailableError("did not end within 55 s", "python", expected=True), "warn"),
    ],
)
def test_work_that_could_not_be_done_is_a_warning(
    tmp_path: Path, answer: Finished | UnavailableError, expected: str
) -> None:
    import sys

    node = fake_node(tmp_path, FakeNvml(1))
    node = dataclasses.replace(node, programs=FakePrograms({sys.executable: answer}))
    assert status("gpu-probe", node) == expected
