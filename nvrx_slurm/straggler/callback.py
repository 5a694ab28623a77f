"""Straggler detection as a callback of PyTorch Lightning, for NeMo and whoever else trains with it."""

from __future__ import annotations

import logging
from statistics import median
from typing import Any

from nvrx_slurm.straggler.callables import CallableId
from nvrx_slurm.straggler.detector import Detector
from nvrx_slurm.straggler.loop import StragglerDetection

_log = logging.getLogger(__name__)


def _callback_class() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return __import__(package, fromlist=["Callback"]).Callback
        except ImportError:
            continue
    return object


_Callback: Any = _callback_class()


class StragglerDetectionCallback(_Callback):  # type: ignore[misc]
    """Measures ``trainer.strategy.training_step`` on every rank, and reports at intervals.

    The arguments are those of :class:`~nvrx_slurm.straggler.loop.StragglerDetection`, and:

    Args:
        enable_ptl_logging: log min, median and max of the scores as ``gpu_relative_perf/…`` and
            ``gpu_individual_perf/…``.

    Raises:
        ValueError: in :meth:`setup`, as :class:`~nvrx_slurm.straggler.loop.StragglerDetection`.
    """

    def __init__(
        self,
        report_time_interval: float,
        calc_relative_gpu_perf: bool,
        calc_individual_gpu_perf: bool,
        num_gpu_perf_scores_to_print: int,
        gpu_relative_perf_threshold: float,
        gpu_individual_perf_threshold: float,
        stop_if_detected: bool,
        enable_ptl_logging: bool,
        profiling_interval: int = 1,
        logger_name: str = "nemo_logger.StragglerDetectionCallback",
    ) -> None:
        super().__init__()
        if not (calc_relative_gpu_perf or calc_individual_gpu_perf):
            raise ValueError("neither calc_relative_gpu_perf nor calc_individual_gpu_perf is set")
        self._arguments: dict[str, Any] = {
            "report_time_interval": report_time_interval,
            "calc_relative_gpu_perf": calc_relative_gpu_perf,
            "calc_individual_gpu_perf": calc_individual_gpu_perf,
            "num_gpu_perf_scores_to_print": num_gpu_perf_scores_to_print,
            "gpu_relative_perf_threshold": gpu_relative_perf_threshold,
            "gpu_individual_perf_threshold": gpu_individual_perf_threshold,
            "stop_if_detected": stop_if_detected,
            "profiling_interval": profiling_interval,
            "logger_name": logger_name,
        }
        self._logs_scores = enable_ptl_logging
        self._detection: StragglerDetection | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin, if this is training."""
        if stage == "fit" and self._detection is None:
            self._detection = StragglerDetection(**self._arguments)
            Detector.wrap_callables([CallableId(trainer.strategy, "training_step")])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End."""
        if stage == "fit" and self._detection is not None:
            self._detection.close()
            self._detection = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report when one is due; have training stop, with a last checkpoint, if a rank is slow for good."""
        if self._detection is None:
            return
        before = self._detection.last_scores
        stop = self._detection.end_iteration()
        if self._logs_scores and self._detection.last_scores is not before:
            for name, scores in self._detection.last_scores.items():
                if scores:
                    values = list(scores.values())
                    pl_module.log(f"{name}/min", min(values), rank_zero_only=True)
                    pl_module.log(f"{name}/median", median(values), rank_zero_only=True)
                    pl_module.log(f"{name}/max", max(values), rank_zero_only=True)
        if stop:
            _log.error("training stops: a rank is slow for good")
            trainer.should_stop = True
            trainer.limit_val_batches = 0
            for callback in getattr(trainer, "checkpoint_callbacks", []):
                callback.save_last = True
