"""Who takes part, which iteration it is, and what follows: the pure core of the hub.

Events of members go in, messages to members come out; no clock, no I/O. There is one phase at a time:

* *running*: members enter the iteration and run. A fault, a loss or a leave interrupts it, once, for all.
* *interrupted*: members arrive when they are ready. When every member that is left has arrived, all are
  released into the next iteration. Faults of this time go with the release.
* *done*: every member has completed. Nothing that happens later matters.

Where members may rejoin, one that comes after the beginning waits: it interrupts nobody, and takes part from
the next iteration on, if the one in whose place it comes is gone by then.

A member that is lost between a release and its entry has no rank yet that others know. It needs none: when
all others have entered, a rank that nobody has is a lost one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nvrx_slurm.supervisor import messages as msg

Send = Callable[[int, msg.Message], None]
"""Called with a member and what it is told; must only queue."""
_MAX_RECORDS = 4096
"""Of one iteration; beyond them nobody reads on."""


class Phase(enum.Enum):
    JOINING = enum.auto()
    RUNNING = enum.auto()
    INTERRUPTED = enum.auto()
    DONE = enum.auto()


@dataclass
class _Member:
    rank: int
    initial_rank: int
    entered: bool = False
    arrived: bool = False
    completed: bool = False
    stuck: bool = False


class Hub:
    """The state of one call of a wrapped function.

    Args:
        world_size: members that must join before the first iteration.
        send: tells a member something.
        may_rejoin: take members in after the beginning, in place of those that are lost.
    """

    def __init__(self, world_size: int, send: Send, may_rejoin: bool = False) -> None:
        self.phase = Phase.JOINING
        self.iteration = 0
        self._world_size = world_size
        self._send = send
        self._may_rejoin = may_rejoin
        self._next_member = world_size
        self._waiting: dict[int, int] = {}
        """Initial ranks of the members that take part from the next iteration on."""
        self._members: dict[int, _Member] = {}
        self._records: list[msg.Record] = []
        self._recorded: set[tuple[int, str]] = set()
        self._gone_early: list[tuple[str, str]] = []
        """Why members went before they had a rank in this iteration."""
        self._left: set[int] = set()
        self._entered = 0
        self._arrived = 0
        self._completed = 0
        self._stuck = 0
        """How many have been stuck in this iteration: an upper bound of those that are."""
        self._expected = world_size

    @property
    def members(self) -> int:
        """How many take part now."""
        return len(self._members)

    def refusal(self, join: msg.Join) -> str:
        """Return why this member can't join; empty: it can."""
        if self.phase is Phase.DONE:
            return "the call has ended"
        if self.phase is not Phase.JOINING and not self._may_rejoin:
            return "the call has begun without it"
        if not 0 <= join.member < self._world_size:
            return f"there are {self._world_size} ranks, this is rank {join.member}"
        if join.world_size != self._world_size:
            return f"WORLD_SIZE is {join.world_size} on rank {join.member}, but {self._world_size} on rank 0"
        if self.phase is Phase.JOINING and (join.member in self._members or join.member in self._left):
            return f"there is a rank {join.member} already; another job with the same MASTER_PORT?"
        return ""

    def number(self, initial_rank: int) -> int:
        """Return the number of the member that joins next, which nobody else ever has."""
        if self.phase is Phase.JOINING:
            return initial_rank
        self._next_member += 1
        return self._next_member - 1

    def join(self, member: int, initial_rank: int) -> None:
        """Take a member in by its number; it has not been refused."""
        if self.phase is Phase.JOINING:
            self._members[member] = _Member(member, initial_rank)
            self._check_joined()
        else:
            self._waiting[member] = initial_rank
            self._send(member, msg.Queued())

    def handle(self, member: int, message: msg.MemberMessage) -> None:
        """Take what a member says. What comes from one that is gone, or of a former iteration, is ignored."""
        if isinstance(message, msg.Leave):
            self._remove(member, message.kind, message.why)
            return
        if isinstance(message, msg.Beat):
            self._send(member, message)
            return
        state = self._members.get(member)
        if state is None or message.iteration != self.iteration or self.phase in (Phase.JOINING, Phase.DONE):
            return
        match message:
            case msg.Enter():
                self._enter(state, message)
            case msg.Fault():
                self._interrupt(msg.Record(state.rank, message.kind, message.why))
            case msg.Arrive():
                self._arrive(state)
            case msg.Stuck():
                self._stuck += not state.stuck
                state.stuck = True
                self._check_arrived()
            case msg.Complete() if self.phase is Phase.RUNNING and not state.completed:
                state.completed = True
                self._completed += 1
                if self._completed == 1:
                    self._tell_all(msg.AnyCompleted(self.iteration))
                self._check_done()

    def lose(self, member: int, kind: str, why: str) -> None:
        """A member is gone without a word: its process ended, or nothing is heard of it."""
        self._remove(member, kind, why)

    # --- transitions -------------------------------------------------------------------------------------

    def _check_joined(self) -> None:
        if self.phase is Phase.JOINING and len(self._members) == self._world_size:
            self.phase = Phase.RUNNING
            self._tell_all(msg.Joined())

    def _enter(self, state: _Member, enter: msg.Enter) -> None:
        if state.entered:
            return
        state.rank = enter.rank
        state.entered = True
        self._entered += 1
        self._expected = enter.world_size
        self._check_entered()

    def _check_entered(self) -> None:
        """When all have entered, a rank that nobody has is one that went before it could."""
        if self.phase is not Phase.RUNNING or not self._members or self._entered < len(self._members):
            return
        missing = self._missing()
        # Those that went after their entry have been recorded with their rank.
        if len(missing) > len(self._gone_early):
            # Another iteration would begin in the same way, and so on for ever.
            self._dismiss(
                self._members,
                f"rank assignment gave {len(self._members)} ranks numbers of {self._expected}, and "
                f"{missing[0]} to none: numbers from 0 without gaps are accepted, for those that are left",
            )
        elif missing:
            kind, why = self._gone_early[0]
            for rank in missing:
                self._interrupt(msg.Record(rank, kind, why))

    def _missing(self) -> list[int]:
        ranks = {state.rank for state in self._members.values()}
        return [rank for rank in range(self._expected) if rank not in ranks]

    def _interrupt(self, record: msg.Record) -> None:
        known = (record.rank, record.kind)
        if known not in self._recorded and len(self._records) < _MAX_RECORDS:
            self._recorded.add(known)
            self._records.append(msg.Record(record.rank, record.kind, record.why[: msg.MAX_WHY]))
        if self.phase is Phase.RUNNING:
            self.phase = Phase.INTERRUPTED
            self._tell_all(msg.Interrupt(self.iteration, tuple(self._records)))

    def _arrive(self, state: _Member) -> None:
        if state.arrived:
            return
        state.arrived = True
        self._arrived += 1
        if self.phase is Phase.RUNNING:
            # It was interrupted by itself alone, and says so as it arrives.
            self._interrupt(msg.Record(state.rank, "EXCEPTION"))
        self._check_arrived()

    def _check_arrived(self) -> None:
        if self.phase is not Phase.INTERRUPTED or not self._members:
            return
        late = len(self._members) - self._arrived
        if late == 0:
            self._release()
        elif self._arrived and late <= self._stuck:
            stuck = [member for member, state in self._members.items() if state.stuck and not state.arrived]
            if len(stuck) == late:
                for member in stuck:
                    self._send(member, msg.OthersWait(self.iteration))

    def _release(self) -> None:
        terminated = self._missing()
        known = {record.rank for record in self._records}
        kind, why = self._gone_early[0] if self._gone_early else ("TERMINATED", "")
        records = [*self._records, *(msg.Record(rank, kind, why) for rank in terminated if rank not in known)]
        joining = self._joining()
        release = msg.Release(self.iteration, tuple(terminated), tuple(records), len(joining))
        size = self._expected
        self._begin_next()
        self._tell_all(release)
        for rank, member in enumerate(joining, size):
            self._members[member] = _Member(rank, self._waiting.pop(member))
            self._send(member, msg.Admitted(rank, size + len(joining), release))

    def _joining(self) -> list[int]:
        """Return who has waited, one for each initial rank that is gone."""
        there = {state.initial_rank for state in self._members.values()}
        joining = []
        for member, initial_rank in self._waiting.items():
            if initial_rank not in there:
                there.add(initial_rank)
                joining.append(member)
        return joining

    def _begin_next(self) -> None:
        self.iteration += 1
        self.phase = Phase.RUNNING
        self._records = []
        self._recorded = set()
        self._gone_early = []
        self._entered = self._arrived = self._completed = self._stuck = 0
        for state in self._members.values():
            state.entered = state.arrived = state.completed = state.stuck = False

    def _check_done(self) -> None:
        if self.phase is Phase.RUNNING and self._members and self._completed == len(self._members):
            self.phase = Phase.DONE
            self._tell_all(msg.Done(self.iteration))
            for member in self._waiting:
                self._send(member, msg.Done(self.iteration))

    def _remove(self, member: int, kind: str, why: str) -> None:
        self._waiting.pop(member, None)
        state = self._members.pop(member, None)
        if state is None:
            return
        self._left.add(member)
        self._entered -= state.entered
        self._arrived -= state.arrived
        self._completed -= state.completed
        if self.phase is Phase.DONE:
            return
        if self.phase is Phase.JOINING:
            # The others can't be complete any more.
            self._dismiss(self._members, f"rank {member} left before all had joined: {why or kind}")
            return
        if state.entered:
            self._interrupt(msg.Record(state.rank, kind or "TERMINATED", why))
        else:
            self._gone_early.append((kind or "TERMINATED", why))
            self._check_entered()
        self._check_arrived()
        if not self._members:
            self._dismiss(self._waiting, "no rank is left")

    def _dismiss(self, members: Iterable[int], why: str) -> None:
        for member in list(members):
            self._send(member, msg.Dismiss(why))

    def _tell_all(self, message: msg.Message) -> None:
        for member in self._members:
            self._send(member, message)
