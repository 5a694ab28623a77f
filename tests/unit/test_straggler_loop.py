"""Straggler detection as a training loop and Lightning use it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm.straggler import Detector, Report, StragglerDetection
from nvrx_slurm.straggler.callback import StragglerDetectionCallback

CONFIG: dict[str, Any] = {
    "report_time_interval": 300.0,
    "calc_relative_gpu_perf": True,
    "calc_individual_gpu_perf": True,
    "num_gpu_perf_scores_to_print": 2,
    "gpu_relative_perf_threshold": 0.7,
    "gpu_individual_perf_threshold": 0.7,
    "stop_if_detected": True,
}
"""Megatron-Bridge's NVRxStragglerDetectionConfig, as it names them."""


def report(relative: Sequence[float], individual: Sequence[float] | None = None) -> Report:
    """Of ranks without a GPU, all with one section."""
    scores = dict(enumerate(relative))
    own = dict(enumerate(individual or [1.0] * len(relative)))
    nan = dict.fromkeys(scores, math.nan)
    nodes = {rank: f"n{rank}" for rank in scores}
    medians = {rank: 10.0 / score for rank, score in scores.items()}
    return Report(nan, {"step": scores}, nan, {"step": own}, nodes, {}, {}, 0.0, True, 0, {"step": medians})


class Reports:
    """In place of what the detector measures."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.next: Report | None = None
        self.asked: list[bool] = []
        patch.setattr(Detector, "generate_report_if_interval_elapsed", self._report)
        patch.setattr(Detector, "is_interval_elapsed", lambda: True)
        patch.setattr(Detector, "any_rank", self._any)

    def _report(self) -> Report | None:
        return self.next

    def _any(self, flag: bool) -> bool:
        self.asked.append(flag)
        return flag


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    yield Reports(monkeypatch)
    Detector.shutdown()


def stops(detection: StragglerDetection, reports: Reports, *given: Report | None) -> list[bool]:
    found = []
    for each in given:
        reports.next = each
        found.append(detection.end_iteration())
    return found


SLOW, WELL = report([1.0, 1.0, 0.5, 1.0]), report([1.0, 1.0, 0.99, 1.0])


def test_training_stops_on_the_second_bad_report_and_never_on_one(reports: Reports) -> None:
    detection = StragglerDetection(**CONFIG)
    assert stops(detection, reports, SLOW, WELL, WELL, SLOW, SLOW) == [False, False, False, False, True]
    assert reports.asked == [False, False, False, False, True], "all ranks agree in each report"


def test_a_rank_without_a_report_follows_the_others(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    detection = StragglerDetection(**CONFIG)
    monkeypatch.setattr(Detector, "any_rank", lambda flag: True)
    assert stops(detection, reports, None) == [True]


def test_unless_it_is_told_to_it_never_stops(reports: Reports) -> None:
    detection = StragglerDetection(**{**CONFIG, "stop_if_detected": False})
    assert stops(detection, reports, SLOW, SLOW, SLOW) == [False] * 3
    assert reports.asked == []


def test_a_rank_that_is_slower_than_it_was_counts_too(reports: Reports) -> None:
    detection = StragglerDetection(**CONFIG)
    worse = report([1.0] * 4, [1.0, 0.4, 1.0, 1.0])
    assert stops(detection, reports, worse, worse) == [False, True]


def test_the_log_names_who_is_slow_and_the_best_and_worst(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stops(StragglerDetection(**CONFIG), reports, SLOW, SLOW)
    for line in (
        "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. Affected ranks: 2 on n2",
        "best rank 0 (n0) 1.000, rank 1 (n1) 1.000; worst rank 2 (n2) 0.500",
        "rank 2 on n2 is slow for good: step takes 10 ms longer than elsewhere, 2 of 3 reports",
    ):
        assert line in caplog.text


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False}, "neither calc_relative"),
        ({"num_gpu_perf_scores_to_print": -1}, "num_gpu_perf_scores_to_print is -1"),
        ({"gpu_relative_perf_threshold": 1.0}, "gpu_relative_perf_threshold is 1.0"),
        ({"gpu_individual_perf_threshold": 0.0}, "gpu_individual_perf_threshold is 0.0"),
        ({"profiling_interval": 0}, "profiling_interval is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StragglerDetection(**{**CONFIG, **wrong})


def test_the_callback_measures_training_steps_reports_and_stops_training(reports: Reports) -> None:
    strategy = SimpleNamespace(training_step=lambda batch: batch * 2)
    original = strategy.training_step
    checkpoint = SimpleNamespace(save_last=False)
    trainer = SimpleNamespace(
        strategy=strategy, should_stop=False, limit_val_batches=1.0, checkpoint_callbacks=[checkpoint]
    )
    logged: dict[str, float] = {}
    module = SimpleNamespace(log=lambda name, value, **_: logged.update({name: value}))
    callback = StragglerDetectionCallback(**CONFIG, enable_ptl_logging=True)
    callback.setup(trainer, module, "validate")
    assert strategy.training_step is original
    callback.setup(trainer, module, "fit")
    for index, each in enumerate((SLOW, SLOW)):
        assert not trainer.should_stop
        assert strategy.training_step(3) == 6
        reports.next = each
        callback.on_train_batch_end(trainer, module, None, None, index)
    assert (trainer.should_stop, checkpoint.save_last) == (True, True)
    assert logged["gpu_relative_perf/min"] == 0.5
    assert set(logged) == {
        f"gpu_{kind}_perf/{what}" for kind in ("relative", "individual") for what in ("min", "median", "max")
    }
    measured = Detector.generate_report()
    assert measured is not None
    assert list(measured.local_section_summaries) == ["SimpleNamespace.training_step"]
    callback.teardown(trainer, module, "fit")
    assert strategy.training_step is original
    callback.on_train_batch_end(trainer, module, None, None, 9)


def test_the_callback_without_any_score_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="neither calc_relative_gpu_perf"):
        StragglerDetectionCallback(
            **{**CONFIG, "calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False},
            enable_ptl_logging=False,
        )
