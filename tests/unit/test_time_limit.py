"""The timer that asks ranks to save before Slurm ends the job, on a clock of the test's own."""

from __future__ import annotations

import asyncio

from nvrx_slurm.coordinator.time_limit import watch_time_limit
from nvrx_slurm.slurm import Job, SlurmUnavailableError, UnknownJobError
from nvrx_slurm.testing.slurm import running_job


class Scene:
    """One watch from 0 s on; ``answers`` are what Slurm says when it is asked, the last again and again."""

    def __init__(self, *answers: int | Exception | None) -> None:
        self.now = 0.0
        self.answers = list(answers)
        self.asked_at: list[float] = []
        self.told: list[tuple[float, str]] = []

    def play(self, ends: int | None, margin_s: float = 120.0) -> Scene:
        asyncio.run(
            watch_time_limit(ends, margin_s, self._ask, self._near, clock=lambda: self.now, wait=self._wait)
        )
        return self

    async def _wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    async def _ask(self) -> Job:
        self.asked_at.append(self.now)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return running_job("7", ["n1"], ends=answer)

    def _near(self, why: str) -> None:
        self.told.append((self.now, why))


def test_ranks_are_asked_the_margin_before_the_end() -> None:
    scene = Scene(3600).play(3600)
    assert scene.told == [(3480.0, "the time limit, 120 s away")]
    assert scene.asked_at == [3480.0]


def test_a_job_without_limit_has_no_timer() -> None:
    scene = Scene(3600).play(None)
    assert (scene.told, scene.asked_at) == ([], [])


def test_a_limit_that_was_raised_meanwhile_counts() -> None:
    assert Scene(7200, 7200).play(3600).told == [(7080.0, "the time limit, 120 s away")]


def test_a_limit_that_was_taken_away_meanwhile_is_none() -> None:
    assert Scene(None).play(3600).told == []


def test_where_slurm_cannot_be_asked_what_was_known_has_to_do() -> None:
    assert Scene(SlurmUnavailableError("no answer")).play(3600).told[0][0] == 3480.0


def test_a_job_that_slurm_does_not_know_is_left_alone() -> None:
    assert Scene(UnknownJobError("?")).play(3600).told == []


def test_a_job_shorter_than_two_margins_gets_half_of_its_time_to_train() -> None:
    assert Scene(100).play(100).told == [(50.0, "the time limit, 50 s away")]
