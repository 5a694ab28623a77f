"""Which lost nodes are brought back and waited for, and when: none while Slurm may be ending the job."""

from __future__ import annotations

from nvrx_slurm.coordinator.membership import Membership
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.steps import Arm, Command, Recall, Timer


class LostNodes:
    """One job's nodes whose agents are gone; all methods return what is to be done."""

    def __init__(self, policy: Policy, members: Membership) -> None:
        self._policy = policy
        self._members = members
        self._asked_away: list[str] = []
        """Nodes whose agents were asked to go; recalled when it is clear that the job is not being ended."""

    @property
    def _may_return(self) -> bool:
        return self._policy.rejoin_timeout_s > 0

    def worn_out(self, node: str) -> str | None:
        """Return why no new agent is of use on a node that has lost its own; None: it may be."""
        losses = self._members.losses_of(node)
        if self._may_return and losses >= self._policy.max_agent_losses:
            return f"it has lost its agent {losses} times"
        return None

    def lost(self, node: str, asked: bool) -> list[Command]:
        """Have a new agent started there; ``asked``: the old one was asked to go."""
        if not self._may_return:
            return []
        if asked and not self._members.is_awaited(node):
            self._asked_away.append(node)
            return []
        return self._recall(node)

    def recall_asked_away(self) -> list[Command]:
        """Slurm is not ending the job: those whose agents were asked to go may come back."""
        nodes, self._asked_away = self._asked_away, []
        return self._recall(*nodes)

    def await_leaving(self) -> list[Command]:
        """Count on nodes whose agents still go, too: they are recalled when they have gone."""
        return self._await(*self._members.leaving) if self._may_return else []

    def _recall(self, *nodes: str) -> list[Command]:
        commands: list[Command] = []
        for node in nodes:
            if not self._members.is_connected(node) and self._members.reason_of(node) is None:
                commands += [*self._await(node), Recall(node)]
        return commands

    def _await(self, *nodes: str) -> list[Command]:
        for node in nodes:
            self._members.await_return(node)
        return [Arm(Timer.REJOIN, self._policy.rejoin_timeout_s) for _ in nodes]
