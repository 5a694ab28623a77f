"""The judgement on a cycle that has ended, and on the attempt as a whole: who is to blame, what follows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.blame import Blame
from nvrx_slurm.coordinator.budget import NO_PROGRESS, Budget
from nvrx_slurm.coordinator.hindsight import Delay, Hindsight, Useless, may_have_trained
from nvrx_slurm.coordinator.past import FRUITLESS_ATTEMPTS, Fruits
from nvrx_slurm.coordinator.policy import EXIT_FAILED, EXIT_RESTART_ELSEWHERE, Policy
from nvrx_slurm.coordinator.running_cycle import RunningCycle
from nvrx_slurm.coordinator.scoring import EndedCycle, Scoring
from nvrx_slurm.coordinator.suspects import Suspects
from nvrx_slurm.journal import FaultDetected, FaultKind, VerdictAction

_REMEMBERED = 8
"""Cycles; what is found out of older ones changes no count."""


@dataclass(frozen=True)
class Replaced:
    """A spare is to take the culprit's place."""

    reason: str
    farewell: str
    """What its agent is told."""
    on_trial: bool


class Judgement:
    """What is known of one job's faults and progress, over all its cycles."""

    def __init__(self, policy: Policy, budget: Budget) -> None:
        self._policy = policy
        self._limits = policy.limits
        self._budget = budget
        self._suspects = Suspects(policy.limits.exclude_after, policy.past.faults)
        self._scoring = Scoring(
            budget.progress, policy.limits, policy.has_iteration_file, self._note_progress
        )
        self._fruits = Fruits()
        self._hindsight = Hindsight(policy.limits.attribution_stop_action)
        self._blamed: dict[int, FaultDetected] = {}
        """Of the last cycles, the fault that was held to be the cause."""
        self._unattributed: dict[int, bool] = {}
        """Cycles that logs and traces have told nothing of yet; whether each may have trained."""
        self._scored = policy.first_cycle
        """The cycle that was scored last."""

    def start(self) -> list[steps.Command]:
        return self._scoring.start()

    def proven_bad(self, now: float) -> tuple[str, ...]:
        """Return the nodes on trial without which training got further."""
        return self._suspects.proven(now)

    # --- a cycle -------------------------------------------------------------------------------------

    def score(
        self, number: int, cycle: RunningCycle, culprit: FaultDetected, now: float
    ) -> list[steps.Command]:
        """Judge a cycle that has just ended, or have the file read that tells how far it came."""
        self._scored = number
        seconds = (cycle.stop_began or now) - cycle.began
        return self._scoring.cycle_ended(EndedCycle(number, cycle.signs, culprit, seconds))

    def iteration_read(self, event: steps.IterationRead) -> list[steps.Command]:
        return self._scoring.iteration_read(event)

    def verdict(
        self, action: VerdictAction, blame: Blame, why: str, number: int, cycle: RunningCycle
    ) -> journal.Verdict:
        """Count the fault against its node; return what to record."""
        fault, place = blame.fault, cycle.place_of(blame.fault.node)
        self._blamed = {at: seen for at, seen in self._blamed.items() if at > number - _REMEMBERED}
        self._blamed[number] = fault
        if place is not None:
            self._suspects.blame(fault, place, cycle.began)
        return journal.Verdict(
            action=action, rule=blame.rule, why=why, node=fault.node, rank=fault.rank, kind=fault.kind
        )

    def no_restart(self, blame: Blame, now: float) -> tuple[steps.End, Blame] | None:
        """Return how the job ends if it may not be restarted again; None: it may."""
        useless = self._hindsight.stop(None, now)
        if useless is not None:
            return self._end_as_useless(useless), replace(blame, rule=useless.rule)
        used_up = self._budget.used_up(now)
        if used_up is None:
            return None
        code = self._limits.no_restart_code if used_up.rule == NO_PROGRESS else EXIT_FAILED
        end = steps.End(code, f"{used_up.why}: {blame.why}")
        return end, replace(blame, rule=used_up.rule or blame.rule)

    def stuck(self) -> steps.End | None:
        """Return how the job ends if training gets no further; None: it does."""
        why = self._budget.progress.stuck(self._limits)
        return None if why is None else steps.End(self._limits.no_restart_code, why)

    # --- what logs and traces tell later ---------------------------------------------------------------

    def attributed(self, event: steps.CycleAttributed, now: float) -> None:
        """Take whom they blame, and whether another try is of use."""
        self._unattributed.pop(event.cycle, None)
        fault = self._blamed.pop(event.cycle, None)
        hung = event.hung
        if fault is not None and fault.kind is FaultKind.HANG and hung is not None and hung != fault.node:
            self._suspects.reassign(fault.node, hung)
        for node in event.exclude:
            self._suspects.accuse(node, now)
        if event.useless or event.hold:
            self._hindsight.note(Useless(event.cycle, event.rule, event.why, event.hold))
        waits = Delay(event.cycle, event.delay_s, event.rule, event.why, now) if event.delay_s > 0 else None
        self._hindsight.note_delay(event.cycle, waits)

    def delay(self, now: float) -> Delay | None:
        """Return how long the restart that has just been decided waits; None: not at all."""
        return self._hindsight.take_delay(now)

    def patience(self, number: int, cycle: RunningCycle, now: float) -> float:
        """Return how long the next cycle waits for the verdict on the last but one; 0: it does not.

        The first restart waits for nothing. But a program that fails as soon as it starts could have failed a
        dozen times before anything is found out.
        """
        if self._limits.verdict_patience_s <= 0:
            return 0.0
        began_to_stop = now if cycle.stop_began is None else cycle.stop_began
        trained = self._unattributed[number] = may_have_trained(cycle, began_to_stop)
        waits = not trained and self._unattributed.get(number - 1) is False
        return self._limits.verdict_patience_s if waits else 0.0

    @property
    def awaited(self) -> bool:
        """Tell whether the verdict is still to come on the last cycle but one that has ended."""
        return len(self._unattributed) > 1

    def useless(self, current: RunningCycle | None, now: float) -> tuple[steps.End, journal.Verdict] | None:
        """Return how the job ends now because another try is of no use; ``current`` runs, None: none does."""
        useless = self._hindsight.stop(current, now)
        if useless is None:
            return None
        end = self._end_as_useless(useless)
        return end, journal.Verdict(action=VerdictAction.STOP, rule=useless.rule, why=end.why)

    def _end_as_useless(self, useless: Useless) -> steps.End:
        if useless.hold:
            why = f"on hold after cycle {useless.cycle}: {useless.why}"
            return steps.End(EXIT_RESTART_ELSEWHERE, why, hold=True)
        why = f"no other try after cycle {useless.cycle}: {useless.why}"
        return steps.End(self._limits.no_restart_code, why)

    def _note_progress(self) -> None:
        self._suspects.note_progress()
        self._hindsight.note_progress(self._scored)

    @property
    def accused(self) -> tuple[str, ...]:
        """Nodes that evidence beside the faults names."""
        return self._suspects.accused

    def without_accused(
        self, node: str, place: int, there_is_spare: bool, now: float
    ) -> Replaced | journal.NodeSuspected | None:
        """Return whether a spare is to take the place of an accused node, or why it stays."""
        reason = "logs or traces name it: a spare is tried in its place"
        return self._try_without(node, place, there_is_spare, now, reason)

    # --- nodes ---------------------------------------------------------------------------------------

    def replacement(
        self, fault: FaultDetected, place: int, there_is_spare: bool, now: float
    ) -> Replaced | journal.NodeSuspected | None:
        """Return whether a spare is to take the place of the culprit's node, or why a suspect stays."""
        if fault.detector == "start" and there_is_spare:
            # It would fail there again, and there is a node that has not.
            reason = f"could not start workers: {fault.detail}"
            return Replaced(reason, "a spare takes this node's place", on_trial=False)
        if self._suspects.is_suspect(fault):
            faults = self._suspects.faults_of(fault.node)
            reason = f"{faults} faults of its own in this job: a spare is tried in its place"
            return self._try_without(fault.node, place, there_is_spare, now, reason)
        return None

    def _try_without(
        self, node: str, place: int, there_is_spare: bool, now: float, reason: str
    ) -> Replaced | journal.NodeSuspected | None:
        former = self._suspects.acquitted_at(place)
        if former is not None:
            stays = f"{former} failed in the same place before it, so the node is not the cause"
        elif not there_is_spare:
            stays = "there is no spare to take its place"
        else:
            self._suspects.try_without(node, place, now)
            return Replaced(reason, reason, on_trial=True)
        if self._suspects.tell_once(node):
            return journal.NodeSuspected(node=node, faults=self._suspects.faults_of(node), why=stays)
        return None

    # --- the attempt ---------------------------------------------------------------------------------

    def measure(self, cycle: RunningCycle, now: float) -> None:
        """Take what the last cycle, if there was one, tells of the attempt as a whole."""
        if not cycle.nodes:
            return
        until = now if cycle.stop_began is None else cycle.stop_began
        self._fruits.longest_s = max(self._fruits.longest_s, until - cycle.began)
        self._fruits.trained |= cycle.signs.trained
        self._budget.progress.note_client(cycle.signs)

    def useless_to_requeue(self, asked_to_end: bool, preempted: bool) -> str | None:
        """Return why the job should not be started again; None: it should."""
        attempts = self._policy.past.fruitless + 1
        fruits = replace(self._fruits, asked_to_end=asked_to_end, preempted=preempted)
        if attempts < FRUITLESS_ATTEMPTS or not fruits.fruitless(self._budget.progress.monitored):
            return None
        return f"not to be requeued, {attempts} attempts in a row have not come to a single step"

    def close(self, cycle: RunningCycle) -> None:
        """Note how far the last cycle came."""
        if self._budget.progress.close(cycle.signs):
            self._suspects.note_progress()
