"""How far each cycle of a schedule came, counted a second time to check the machine's verdicts against."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.policy import Policy


@dataclass
class Run:
    """One cycle."""

    began: float
    stop_began: float | None = None
    step: int | None = None
    saved: int | None = None
    loaded: int | None = None
    heartbeat: bool = False
    further: bool = False
    over: bool = False

    @property
    def trained(self) -> bool:
        return self.heartbeat or self.step is not None or self.saved is not None

    @property
    def told(self) -> bool:
        return self.step is not None or self.saved is not None


def most(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)


class Course:
    """The cycles so far, and what every rank and the checkpoint-iteration file have said."""

    def __init__(self, policy: Policy) -> None:
        self.limits = policy.limits
        self.with_file = policy.has_iteration_file
        self.past = policy.past
        self.monitored = policy.past.progress.monitored
        self.step = policy.past.progress.step
        self.saved = policy.past.progress.saved
        self.runs: list[Run] = []
        self.file: dict[int | None, int | None] = {}

    @property
    def over(self) -> bool:
        """No cycle runs, or the last has been stopped."""
        return not self.runs or self.runs[-1].over

    @property
    def ever_trained(self) -> bool:
        return any(run.trained for run in self.runs)

    def longest(self, now: float) -> float:
        ends = [(run, now if run.stop_began is None else run.stop_began) for run in self.runs]
        return max((end - run.began for run, end in ends), default=0.0)

    def before(self, event: steps.Event, of_this_cycle: bool) -> None:
        if isinstance(event, steps.IterationRead) and event.step is not None:
            # Somebody has written it: a reading that is late or lost changes when it counts, not whether.
            self.saved = most(self.saved, event.step) if event.cycle is None else self.saved
            self.file[event.cycle] = event.step
        if not of_this_cycle:
            return
        run = self.runs[-1]
        match event:
            case steps.NodeReady():
                self.monitored = True
            case steps.NodeStepping(step=step):
                run.heartbeat, run.step = True, most(run.step, step)
            case steps.NodeStopped(stalled_s=stalled_s):
                run.heartbeat |= stalled_s is not None
            case steps.StepReached(step=step):
                run.step = most(run.step, step)
            case steps.CheckpointSaved(step=step):
                run.saved = most(run.saved, step)
            case steps.CheckpointLoaded(step=step):
                run.loaded = most(run.loaded, step)
            case _:
                pass
        self.monitored |= run.trained

    def begin_cycle(self, now: float) -> None:
        self.runs.append(Run(now))

    def begin_stop(self, now: float) -> None:
        run = self.runs[-1]
        run.stop_began = now if run.stop_began is None else run.stop_began

    def end_cycle(self) -> None:
        run = self.runs[-1]
        run.over = True
        checkpoints = self.saved is not None or run.saved is not None
        before = most(self.saved if checkpoints else self.step, run.loaded)
        now = run.saved if checkpoints else run.step
        run.further = now is not None and (
            before is None or now - before >= self.limits.min_progress_iterations
        )
        self.step = most(self.step, run.step)
        self.saved = most(self.saved, run.saved)
        if self.saved is not None:
            self.saved = most(self.saved, run.loaded)

    def may_stop(self) -> None:
        """A job that gets further is not stopped for getting no further."""
        cycles = self.limits.max_no_progress_cycles
        assert cycles > 0, "nobody wants to stop it"
        if self.with_file:
            # Which reading was in time is the machine's affair; it needs as many cycles all the same.
            assert sum(run.over for run in self.runs) + self.past.progress.in_a_row >= cycles
            return
        without = self.past.progress.in_a_row
        for run in self.runs:
            if run.over:
                without = 0 if run.further else without + 1
        assert without >= cycles, f"it got further {without} cycles ago"

    def may_go_on(self) -> None:
        """A job whose cycles tell their steps, and get no further, is not restarted."""
        cycles = self.limits.max_no_progress_cycles
        last = [run for run in self.runs if run.over][-cycles:] if cycles else []
        stuck = len(last) == cycles and all(run.told and not run.further for run in last)
        assert not cycles or self.with_file or not stuck, "another cycle of the same"
