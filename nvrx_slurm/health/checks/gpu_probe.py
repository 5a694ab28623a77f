"""Do the GPUs compute, and equally fast?"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from nvrx_slurm.health import gpu_work
from nvrx_slurm.health.gpus import name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.other_jobs import other_jobs
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, Status, fail, ok, skip, warn
from nvrx_slurm.health.stage import NODE_STAGES

_SIGNAL = "matrix products, copies and an all-reduce on every GPU"
_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_HOME")


class GpuProbeSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    answer_s: Annotated[
        float, msgspec.Meta(gt=0, le=600, description="the work must be done by then; below timeout_s")
    ] = 55.0
    warn_fraction: Annotated[
        float, msgspec.Meta(gt=0, le=1, description="slower than this share of the node's median: warn")
    ] = 0.9
    fail_fraction: Annotated[
        float, msgspec.Meta(gt=0, le=1, description="slower than this share of the node's median: fail")
    ] = 0.75


class Measured(msgspec.Struct, frozen=True):
    """What one GPU did."""

    gpu: int
    tflops: float
    gbps: float
    checksum: int
    model: str
    all_reduce: float | None = None


@check(
    "gpu-probe",
    stages=NODE_STAGES,
    needs=(Need.NVML, Need.GPU_MEMORY),
    settings=GpuProbeSettings,
    budget_s=60.0,
    lane="gpu-probe",
    opt_in=True,
)
def gpu_probe(node: Node, settings: GpuProbeSettings) -> list[CheckResult]:
    """The GPUs compute the same, and equally fast.

    Multiplies matrices and copies memory on every GPU for some seconds, then sums over all of them, in a
    program of its own that needs torch, 4 GiB of each GPU and nobody else on them. Another result than the
    other GPUs have, or a wrong sum, is a fail; so is being much slower than the node's median. Skipped while
    somebody else is at work, and a fail counts as a warn when somebody has come meanwhile. Only where it
    is asked for: --only gpu-probe --budget 60s, or mode on in the configuration with a budget that is long
    enough.
    """
    if node.nvml.count() == 0:
        return [skip("the driver lists no GPU", _SIGNAL)]
    if somebody := _somebody(node):
        return [skip(f"{somebody}: it would be measured, too", _SIGNAL)]
    argv = [sys.executable, str(Path(gpu_work.__file__))]
    environ = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
    done = node.programs.run(argv, settings.answer_s, environ)
    if done.code == gpu_work.NOTHING_TO_DO:
        return [skip(done.output[:120] or "there is nothing to work on", _SIGNAL)]
    try:
        measured = msgspec.json.decode(done.output, type=list[Measured])
    except msgspec.MsgspecError:
        said = (done.errors or done.output).splitlines()[-1:]
        return [warn(f"the work could not be done: exit code {done.code} {''.join(said)[:120]}", _SIGNAL)]
    results = judge(measured, settings)
    somebody = _somebody(node)
    return [_of_somebody(result, somebody) if somebody else result for result in results]


def _somebody(node: Node) -> str:
    """Return who is at work on the node; empty: nobody."""
    for gpu in range(node.nvml.count()):
        if processes := node.nvml.processes(gpu):
            return f"process {processes[0]} is on {name(gpu)}"
    return "another job runs here" if other_jobs(node) else ""


def _of_somebody(result: CheckResult, somebody: str) -> CheckResult:
    if result.status is not Status.FAIL:
        return result
    return warn(f"{result.evidence}; {somebody}", result.signal, result.scope, result.remedy)


def judge(measured: Sequence[Measured], settings: GpuProbeSettings) -> list[CheckResult]:
    """Compare the GPUs with each other."""
    results = [*_wrong(measured), *_slow(measured, settings)]
    if results or not measured:
        return results
    slowest = min(measured, key=lambda one: one.tflops)
    return [ok(f"{len(measured)} GPUs, {slowest.tflops:.0f} TFLOP/s and more", _SIGNAL)]


def _wrong(measured: Sequence[Measured]) -> list[CheckResult]:
    results = []
    expected_sum = len(measured) * (len(measured) + 1) / 2
    for model in dict.fromkeys(one.model for one in measured):
        alike = [one for one in measured if one.model == model]
        (common, votes), *_ = Counter(one.checksum for one in alike).most_common(1)
        if 2 * votes <= len(alike) and votes < len(alike):
            results.append(warn(f"the GPUs disagree, and none is in the majority ({model})", _SIGNAL))
            continue
        results += [
            _fail("computes something else than the others", one) for one in alike if one.checksum != common
        ]
    results += [
        _fail(f"an all-reduce gave {one.all_reduce:g} instead of {expected_sum:g}", one)
        for one in measured
        if one.all_reduce is not None and one.all_reduce != expected_sum
    ]
    return results


def _fail(evidence: str, one: Measured) -> CheckResult:
    remedy = "run the vendor's diagnosis (dcgmi diag -r 3); replace the GPU if that fails too"
    return fail(evidence, _SIGNAL, name(one.gpu), remedy=remedy, action=Action.ISOLATE)


def _slow(measured: Sequence[Measured], settings: GpuProbeSettings) -> list[CheckResult]:
    results = []
    for what, unit in (("tflops", "TFLOP/s"), ("gbps", "GB/s")):
        usual = median(getattr(one, what) for one in measured) if measured else 0.0
        for one in measured:
            speed = getattr(one, what)
            evidence = f"{speed:.0f} {unit} where the node's median is {usual:.0f}"
            remedy = "look at clocks, power and temperature of the GPU"
            if speed < settings.fail_fraction * usual:
                results.append(fail(evidence, _SIGNAL, name(one.gpu), remedy=remedy))
            elif speed < settings.warn_fraction * usual:
                results.append(warn(evidence, _SIGNAL, name(one.gpu), remedy))
    return results
