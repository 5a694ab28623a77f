"""Whether the next cycle can begin, and on which nodes."""

from __future__ import annotations

from nvrx_slurm.coordinator.budget import Budget
from nvrx_slurm.coordinator.membership import Membership
from nvrx_slurm.coordinator.policy import EXIT_RESTART_ELSEWHERE, EXIT_USAGE, Policy
from nvrx_slurm.coordinator.steps import Arm, End, Timer
from nvrx_slurm.journal import NodesAwaited

_LONGEST_GRACE_S = 15.0


class Formation:
    """Looks at one job's nodes whenever something changes while there is no cycle."""

    def __init__(self, policy: Policy, members: Membership, budget: Budget) -> None:
        self.began: float | None = None
        """When the job began to wait for its nodes."""
        self.grace_over = False
        """The first cycle waits no more for nodes that would be spares."""
        self.waits_for: set[Timer] = set()
        """Why the next cycle waits although its nodes are here: a delay, or a verdict."""
        self._policy = policy
        self._members = members
        self._budget = budget
        self._told_of_topology = False
        self._told_wait = False

    @property
    def awaits_more(self) -> bool:
        """Tell whether nodes may still come that would stay spares if the first cycle began now."""
        return self._members.expects_more and not self.grace_over and self._budget.restarts == 0

    def decide(self, before: tuple[str, ...], cause: str, now: float) -> tuple[str, ...] | Arm | End | None:
        """Return the nodes of the next cycle, for what to wait, or how the job ends for lack of nodes.

        None: nodes have to come, and the timers that run are enough.

        Args:
            before: the nodes of the last cycle; empty: there was none.
            cause: why it ended.
        """
        policy, members = self._policy, self._members
        if not before and not members.expects_more and members.lacks_domains:
            return End(
                EXIT_USAGE,
                f"segments of {policy.segment} nodes need NVLink domains, and no node tells its own: neither "
                "NVML's fabric information nor NVRX_DOMAIN_ID",
            )
        shortage = members.shortage(before)
        if shortage is not None:
            return End(EXIT_RESTART_ELSEWHERE, f"{shortage}: {cause}" if cause else shortage)
        if members.usable_count < policy.active_nodes:
            return None
        if self.awaits_more:
            return Arm(Timer.FORM_GRACE, self._grace_s(now))
        return members.choose(before)

    def _grace_s(self, now: float) -> float:
        """As long as the first have taken: where agents are slow to start, they differ by more."""
        took_s = 0.0 if self.began is None else now - self.began
        return max(self._policy.form_grace_s, min(took_s, _LONGEST_GRACE_S))

    def wait_once(self) -> NodesAwaited | None:
        """Return for which lost nodes the next cycle waits; None: for none, or that has been told."""
        members, policy = self._members, self._policy
        if self._told_wait or members.usable_count >= policy.active_nodes or not members.awaited:
            return None
        self._told_wait = True
        return NodesAwaited(
            nodes=list(members.awaited),
            needed=policy.active_nodes,
            here=members.usable_count,
            seconds=policy.rejoin_timeout_s,
        )

    def over(self) -> None:
        """A cycle has begun: the next wait is another one."""
        self._told_wait = False

    def trouble_once(self) -> str:
        """Return what is wrong with what is known of the topology, in one call only; empty: nothing."""
        trouble = "" if self._told_of_topology else self._members.topology.trouble
        self._told_of_topology |= bool(trouble)
        return trouble
