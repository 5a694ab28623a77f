"""How the job is to end: who has asked for it, and what Slurm, which may be ending it, says."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.blame import Blame
from nvrx_slurm.coordinator.policy import EXIT_RESTART_ELSEWHERE, Policy
from nvrx_slurm.coordinator.steps import Arm, End, Timer
from nvrx_slurm.coordinator.unhealthy import LOOK_S
from nvrx_slurm.journal import FaultDetected, FaultKind


@dataclass(frozen=True)
class Lack:
    """There are too few nodes, unless some come back."""

    end: End
    """How the job ends if none does."""
    blame: Blame | None
    """None: no cycle has ended because of it."""


class Ending:
    """What was asked of one job, and what it is going to end with."""

    def __init__(self, policy: Policy) -> None:
        self.end: End | None = None
        """What the job ends with when all have stopped; None: nobody wants it to end."""
        self.draining = False
        """The ranks were asked to save and end: no cycle follows this one."""
        self.preempted = False
        self.left_by_signal = False
        """Agents went because they were asked to, as Slurm does when it ends the job."""
        self._policy = policy
        self._signalled: signal.Signals | None = None
        self._awaits_slurm = False
        self._lack: Lack | None = None

    @property
    def settled(self) -> End | None:
        """What the job ends with now that all have stopped; None: Slurm's answer may still change that."""
        return None if self._awaits_slurm else self.end

    def signalled(self, event: steps.StopRequested) -> End | None:
        """Take a signal; return the end if this is not the first: who repeats it will not wait."""
        again, self._signalled = self._signalled is not None, event.signal
        end = End(128 + event.signal, f"asked to stop by {event.signal.name}")
        if again:
            return end
        self.end = self.end or end
        return None

    def stop(
        self, cycle: int, nodes: tuple[str, ...], faults: Sequence[FaultDetected]
    ) -> list[steps.Command]:
        """Have the workers on ``nodes`` stopped: with the ranks' own grace if the job is asked to end."""
        policy, look_s = self._policy, 0.0
        hung = tuple(f.rank for f in faults if f.kind is FaultKind.HANG and f.rank is not None)
        if self._signalled is None or policy.term_timeout_s is None:
            if any(fault.kind is FaultKind.UNHEALTHY for fault in faults):
                look_s = LOOK_S
            stop = steps.StopCycle(cycle, nodes, hung, look_s=look_s)
            return [stop, Arm(Timer.STOP, policy.stop_timeout_s)]
        stop = steps.StopCycle(cycle, nodes, hung, self._signalled, policy.term_timeout_s)
        return [stop, Arm(Timer.STOP, policy.stop_timeout_s + policy.term_timeout_s)]

    # --- Slurm ---------------------------------------------------------------------------------------

    def ask_slurm(self) -> steps.Command:
        """Ask whether the job is preempted: that brings the same signal as a cancellation."""
        self._awaits_slurm = True
        return steps.ConsultSlurm()

    def consult(self, lack: Lack) -> list[steps.Command]:
        """Hear Slurm before the job ends for lack of nodes."""
        self._lack = lack
        return [steps.ConsultSlurm(), self.await_answer()]

    def await_answer(self) -> steps.Command:
        return Arm(Timer.CONSULT, self._policy.consult_timeout_s)

    def take_answer(self, event: steps.SlurmAnswered, consulting: bool) -> bool:
        """Take Slurm's answer; tell whether it says for the first time that the job is preempted.

        ``consulting``: the job waits for it. It counts for a job that somebody has sent a signal, too.
        """
        self._awaits_slurm = False
        concerned = self._signalled is not None or consulting
        if not (event.preempted and concerned) or self.preempted:
            return False
        self.preempted = True
        self.end = End(EXIT_RESTART_ELSEWHERE, "Slurm preempts the job")
        return True

    def after_answer(self, job_state: str | None, alone: bool) -> steps.Command | Lack:
        """Return what follows from the answer that the job has waited for.

        An end, the lack of nodes that was to be the end and is none of Slurm's, or a timer: ``alone``, this
        host may be the one that is cut off, and waits until Slurm can be asked.
        """
        if self.end is not None:
            return self.end
        if job_state is None and alone:
            return self.await_answer()
        if job_state not in (None, "RUNNING"):
            return End(128 + signal.SIGTERM, f"Slurm has ended the job: {job_state}")
        assert self._lack is not None, "nothing else is waited for"
        return self._lack
