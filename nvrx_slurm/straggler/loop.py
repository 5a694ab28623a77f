"""Straggler detection in a training loop: one object to make, one call an iteration."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from statistics import median

from nvrx_slurm.pace import Recent, Watch
from nvrx_slurm.pace.exchange import printable
from nvrx_slurm.straggler.detector import Detector
from nvrx_slurm.straggler.report import Report
from nvrx_slurm.straggler.reporting import INDIVIDUAL, RELATIVE

STEP = "step"
_NEEDED, _OF = 2, 3


class StragglerDetection:
    """Measures an iteration's sections, says who is slow, and whether training should stop for it.

    ::

        detection = StragglerDetection(report_time_interval=60, stop_if_detected=True)
        for batch in batches:
            with detection.section("forward"):
                loss = model(batch)
            if detection.end_iteration():
                break
        detection.close()

    The arguments are those of Megatron-Bridge's ``NVRxStragglerDetectionConfig``. Without a GPU the scores
    are those of the section where a rank is worst.

    Args:
        report_time_interval: seconds between reports.
        calc_relative_gpu_perf: compare with the fastest rank.
        calc_individual_gpu_perf: compare with the rank's own best report.
        num_gpu_perf_scores_to_print: so many of the best and the worst are logged with a report; 0: none.
        gpu_relative_perf_threshold, gpu_individual_perf_threshold: scores below are a straggler's.
        stop_if_detected: :meth:`end_iteration` says so, on all ranks in the same iteration, when a rank has
            been slow in 2 of the last 3 reports. Reports then go through ``torch.distributed``.
        profiling_interval: one in so many entries of a section is measured.
        logger_name: of the logger on rank 0.

    Raises:
        ValueError: an argument is not accepted, or neither kind of score is asked for.
        RuntimeError: the :class:`Detector` is in use already.
    """

    def __init__(
        self,
        report_time_interval: float = 300.0,
        calc_relative_gpu_perf: bool = True,
        calc_individual_gpu_perf: bool = True,
        num_gpu_perf_scores_to_print: int = 5,
        gpu_relative_perf_threshold: float = 0.7,
        gpu_individual_perf_threshold: float = 0.7,
        stop_if_detected: bool = False,
        profiling_interval: int = 1,
        logger_name: str = "nvrx_slurm.straggler",
    ) -> None:
        scores = [RELATIVE] * calc_relative_gpu_perf + [INDIVIDUAL] * calc_individual_gpu_perf
        if not scores:
            raise ValueError("neither calc_relative_gpu_perf nor calc_individual_gpu_perf is set")
        if num_gpu_perf_scores_to_print < 0:
            raise ValueError(
                f"num_gpu_perf_scores_to_print is {num_gpu_perf_scores_to_print}: 0 or more is accepted"
            )
        for name, value in (
            ("gpu_relative_perf_threshold", gpu_relative_perf_threshold),
            ("gpu_individual_perf_threshold", gpu_individual_perf_threshold),
        ):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value}: above 0 and below 1 is accepted")
        self._printed = num_gpu_perf_scores_to_print
        self._thresholds = (gpu_relative_perf_threshold, gpu_individual_perf_threshold)
        self._stops = stop_if_detected
        self._log = logging.getLogger(logger_name)
        self._watch = Watch(threshold=gpu_relative_perf_threshold, slow_reports=_NEEDED, of_reports=_OF)
        self._recent = Recent[tuple[str, int]](_NEEDED, _OF)
        self.last_scores: Mapping[str, Mapping[int, float]] = {}
        """``gpu_relative_perf`` and ``gpu_individual_perf`` of the last report, by rank."""
        Detector.initialize(
            scores_to_compute=scores,
            profiling_interval=profiling_interval,
            report_time_interval=report_time_interval,
            exchange="torch" if stop_if_detected else "auto",
        )

    def section(self, name: str = STEP, profile_cuda: bool = True) -> AbstractContextManager[None]:
        """Return a context that measures its body; see :meth:`Detector.detection_section`."""
        return Detector.detection_section(name, profile_cuda=profile_cuda)

    def end_iteration(self) -> bool:
        """Count an iteration; every rank calls it. True: training should stop, as all ranks are told."""
        report = Detector.generate_report_if_interval_elapsed()
        slow = report is not None and self._take(report)
        return self._stops and Detector.is_interval_elapsed() and Detector.any_rank(slow)

    def close(self) -> None:
        """End."""
        Detector.shutdown()

    def _take(self, report: Report) -> bool:
        """Log a report; tell whether a rank has been slow in enough of the last ones."""
        relative = _scores(report.gpu_relative_perf_scores, report.section_relative_perf_scores)
        individual = _scores(report.gpu_individual_perf_scores, report.section_individual_perf_scores)
        self.last_scores = {"gpu_relative_perf": relative, "gpu_individual_perf": individual}
        for title, scores in (("relative", relative), ("individual", individual)):
            if self._printed and scores:
                self._log.info("%s", _best_and_worst(title, scores, report.rank_to_node, self._printed))
        slow: set[tuple[str, int]] = set()
        for kind, scores, threshold, text in (
            ("relative", relative, self._thresholds[0], "Some GPUs have worse relative performance."),
            ("individual", individual, self._thresholds[1], "Some GPUs performance dropped."),
        ):
            ranks = sorted(rank for rank, score in scores.items() if score < threshold)
            if ranks:
                where = ", ".join(f"{rank} on {report.rank_to_node[rank]}" for rank in ranks)
                self._log.warning("STRAGGLER DETECTION WARNING: %s Affected ranks: %s", text, where)
            slow |= {(kind, rank) for rank in ranks}
        for verdict in self._watch.add(report):
            self._log.warning(
                "rank %d on %s is slow for good: %s takes %.3g ms longer than elsewhere, %d of %d reports",
                *(verdict.rank, verdict.node, printable(verdict.section), verdict.lost_ms),
                *(verdict.reports, verdict.of_reports),
            )
        return bool(self._recent.note(slow))


def _scores(of_gpus: Mapping[int, float], of_sections: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Return each rank's score: its GPU's or, where nothing ran on one, that of its worst section."""
    found = {rank: score for rank, score in of_gpus.items() if not math.isnan(score)}
    if found:
        return found
    for of_ranks in of_sections.values():
        for rank, score in of_ranks.items():
            if not math.isnan(score):
                found[rank] = min(score, found.get(rank, 1.0))
    return found


def _best_and_worst(title: str, scores: Mapping[int, float], nodes: Mapping[int, str], count: int) -> str:
    best_first = sorted(scores, key=lambda rank: -scores[rank])

    def listed(ranks: list[int]) -> str:
        return ", ".join(f"rank {rank} ({nodes[rank]}) {scores[rank]:.3f}" for rank in ranks)

    best, worst = listed(best_first[:count]), listed(best_first[::-1][:count])
    return f"{title} scores, median {median(scores.values()):.3f}: best {best}; worst {worst}"
