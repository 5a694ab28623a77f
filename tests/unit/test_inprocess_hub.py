"""The hub of an in-process restart: who is told what, for every order of events."""

from __future__ import annotations

import contextlib
import errno
import random
import resource
import select
import selectors
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.inprocess.link import describe_with_reason
from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.hub import Hub, Phase
from nvrx_slurm.supervisor.hub_server import HubServer
from nvrx_slurm.supervisor.hub_store import HubStore
from nvrx_slurm.supervisor.stream import Stream


class World:
    """A hub whose members do what the protocol asks of them."""

    def __init__(self, size: int, may_rejoin: bool = False) -> None:
        self.told: dict[int, list[msg.Message]] = defaultdict(list)
        self.hub = Hub(size, lambda member, message: self.told[member].append(message), may_rejoin)
        self.size = size
        for member in range(size):
            join = msg.Join("", member, size)
            assert self.hub.refusal(join) == ""
            self.hub.join(member, member)

    def enter_all(self, ranks: dict[int, int] | None = None) -> None:
        ranks = {member: member for member in range(self.size)} if ranks is None else ranks
        for member, rank in ranks.items():
            self.hub.handle(member, msg.Enter(self.hub.iteration, rank, len(ranks)))

    def last(self, member: int) -> msg.Message:
        return self.told[member][-1]


def test_nobody_begins_before_all_have_joined() -> None:
    told: list[tuple[int, msg.Message]] = []
    hub = Hub(2, lambda member, message: told.append((member, message)))
    hub.join(0, 0)
    assert told == []
    hub.join(1, 1)
    assert told == [(0, msg.Joined()), (1, msg.Joined())]


def test_a_member_that_does_not_fit_is_refused_with_the_reason() -> None:
    hub = Hub(2, lambda member, message: None)
    assert "WORLD_SIZE is 3 on rank 1, but 2" in hub.refusal(msg.Join("", 1, 3))
    assert "this is rank 2" in hub.refusal(msg.Join("", 2, 2))
    hub.join(0, 0)
    assert "already" in hub.refusal(msg.Join("", 0, 2))


def test_who_waits_for_the_others_learns_that_one_has_left_before_it_joined() -> None:
    world = World.__new__(World)
    world.told = defaultdict(list)
    world.hub = Hub(3, lambda member, message: world.told[member].append(message))
    world.hub.join(0, 0)
    world.hub.join(1, 1)
    world.hub.lose(1, "TERMINATED", "killed")
    assert world.told[0] == [msg.Dismiss("rank 1 left before all had joined: killed")]


def test_one_fault_interrupts_all_once_and_later_ones_are_merged_at_the_release() -> None:
    world = World(3)
    world.enter_all()
    world.hub.handle(1, msg.Fault(0, "EXCEPTION", "bad"))
    world.hub.handle(2, msg.Fault(0, "EXCEPTION", "worse"))
    first = msg.Record(1, "EXCEPTION", "bad")
    for member in range(3):
        assert world.told[member][1:] == [msg.Interrupt(0, (first,))]
        world.hub.handle(member, msg.Arrive(0))
    for member in range(3):
        assert world.last(member) == msg.Release(0, (), (first, msg.Record(2, "EXCEPTION", "worse")))
    assert world.hub.iteration == 1


def test_a_member_that_dies_is_terminated_in_the_numbering_of_the_iteration() -> None:
    world = World(3)
    world.enter_all({0: 2, 1: 0, 2: 1})
    world.hub.lose(1, "TERMINATED", "")
    for member in (0, 2):
        world.hub.handle(member, msg.Arrive(0))
        assert isinstance(world.told[member][1], msg.Interrupt)
    assert world.last(0) == msg.Release(0, (0,), (msg.Record(0, "TERMINATED", ""),))
    assert world.hub.members == 2


def test_a_member_that_dies_between_release_and_entry_is_the_rank_that_nobody_has() -> None:
    world = World(3)
    world.enter_all()
    world.hub.handle(0, msg.Fault(0, "EXCEPTION"))
    for member in range(3):
        world.hub.handle(member, msg.Arrive(0))
    world.hub.lose(1, "TERMINATED", "out of memory")
    world.hub.handle(0, msg.Enter(1, 0, 3))
    assert isinstance(world.last(0), msg.Release)
    world.hub.handle(2, msg.Enter(1, 2, 3))
    assert world.last(0) == msg.Interrupt(1, (msg.Record(1, "TERMINATED", "out of memory"),))


def test_a_member_that_leaves_because_its_rank_is_discarded_interrupts_nobody() -> None:
    world = World(3)
    world.enter_all()
    world.hub.handle(0, msg.Fault(0, "EXCEPTION"))
    for member in range(3):
        world.hub.handle(member, msg.Arrive(0))
    world.hub.handle(1, msg.Leave(0))
    for member, rank in ((0, 0), (2, 1)):
        world.hub.handle(member, msg.Enter(1, rank, 2))
        assert isinstance(world.last(member), msg.Release)
    assert world.hub.phase is Phase.RUNNING


def late(world: World, initial_rank: int) -> int:
    """Have a member come after the beginning; return its number."""
    assert world.hub.refusal(msg.Join("", initial_rank, world.size)) == ""
    member = world.hub.number(initial_rank)
    world.hub.join(member, initial_rank)
    return member


def test_who_comes_in_place_of_a_lost_rank_takes_part_from_the_next_iteration_on() -> None:
    world = World(3, may_rejoin=True)
    world.enter_all()
    world.hub.lose(1, "TERMINATED", "")
    for member in (0, 2):
        world.hub.handle(member, msg.Arrive(0))
    world.enter_all({0: 0, 2: 1})
    told = dict(world.told)
    new = late(world, 1)
    # It interrupts nobody, and the hub answers its heartbeat.
    assert {member: world.told[member] for member in (0, 1, 2)} == told
    world.hub.handle(new, msg.Beat())
    assert world.told[new] == [msg.Queued(), msg.Beat()]
    world.hub.handle(2, msg.Fault(1, "EXCEPTION"))
    world.hub.lose(0, "TERMINATED", "")
    world.hub.handle(2, msg.Arrive(1))
    records = (msg.Record(1, "EXCEPTION"), msg.Record(0, "TERMINATED"))
    release = msg.Release(1, (0,), records, joined=1)
    assert world.last(2) == release
    assert world.last(new) == msg.Admitted(2, 3, release)
    world.enter_all({2: 0, new: 1})
    for member in (2, new):
        world.hub.handle(member, msg.Complete(2))
    assert world.last(new) == msg.Done(2)
    assert "has ended" in world.hub.refusal(msg.Join("", 0, 3))


def test_two_in_one_place_never_take_part_together() -> None:
    world = World(2, may_rejoin=True)
    world.enter_all()
    # The one in whose place they come is still there, for all that is known.
    first, second = late(world, 1), late(world, 1)
    world.hub.handle(0, msg.Fault(0, "EXCEPTION"))
    for member in (0, 1):
        world.hub.handle(member, msg.Arrive(0))
    assert world.last(0) == msg.Release(0, (), (msg.Record(0, "EXCEPTION"),))
    world.enter_all({0: 0, 1: 1})
    world.hub.lose(1, "UNRESPONSIVE", "")
    world.hub.handle(0, msg.Arrive(1))
    assert isinstance(world.last(first), msg.Admitted)
    assert world.last(second) == msg.Queued()
    world.enter_all({0: 0, first: 1})
    for member in (0, first):
        world.hub.handle(member, msg.Complete(2))
    # A call that is over needs no more ranks.
    assert world.last(second) == msg.Done(2)


def test_who_waits_for_an_iteration_that_never_comes_is_told_so() -> None:
    world = World(1, may_rejoin=True)
    world.enter_all()
    new = late(world, 0)
    world.hub.lose(0, "TERMINATED", "")
    assert world.last(new) == msg.Dismiss("no rank is left")
    assert "begun without it" in World(1).hub.refusal(msg.Join("", 0, 1))


def test_all_complete_or_all_restart() -> None:
    world = World(2)
    world.enter_all()
    world.hub.handle(0, msg.Complete(0))
    assert world.last(1) == msg.AnyCompleted(0)
    world.hub.handle(1, msg.Fault(0, "EXCEPTION"))
    world.hub.handle(1, msg.Complete(0))
    assert isinstance(world.last(0), msg.Interrupt)
    for member in range(2):
        world.hub.handle(member, msg.Arrive(0))
    world.enter_all()
    for member in range(2):
        world.hub.handle(member, msg.Complete(1))
    assert world.last(0) == world.last(1) == msg.Done(1)
    world.hub.lose(1, "TERMINATED", "")
    assert world.last(0) == msg.Done(1)


def test_only_a_stuck_member_is_told_that_all_others_wait_for_it() -> None:
    world = World(4)
    world.enter_all()
    world.hub.handle(0, msg.Fault(0, "SOFT_TIMEOUT"))
    world.hub.handle(1, msg.Arrive(0))
    world.hub.handle(0, msg.Stuck(0))
    world.hub.handle(2, msg.Arrive(0))
    assert isinstance(world.last(0), msg.Interrupt)
    # Rank 3 takes its time in finalize, and is stuck in nothing.
    world.hub.handle(3, msg.Arrive(0))
    assert world.last(0) == msg.OthersWait(0)


def test_nobody_is_told_so_while_none_waits() -> None:
    world = World(2)
    world.enter_all()
    for member in range(2):
        world.hub.handle(member, msg.Fault(0, "SOFT_TIMEOUT"))
        world.hub.handle(member, msg.Stuck(0))
    assert not any(isinstance(message, msg.OthersWait) for told in world.told.values() for message in told)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 6), seed=st.integers(0, 10**6), faults=st.integers(0, 12))
def test_whatever_happens_all_that_are_left_go_on_or_end_together(size: int, seed: int, faults: int) -> None:
    """Members follow the protocol in random order; faults, deaths, replacements come at random moments."""
    chance = random.Random(seed)
    world = World(size, may_rejoin=True)
    alive = set(range(size))
    rank = {member: member for member in range(size)}
    state = dict.fromkeys(alive, "enter")
    iteration = dict.fromkeys(alive, 0)
    size_now = dict.fromkeys(alive, size)
    read: dict[int, int] = defaultdict(int)
    replaced: list[int] = []
    """Initial ranks of those that died and have nobody in their place."""
    initial = {member: member for member in range(size)}

    def hear(member: int) -> None:
        while read[member] < len(world.told[member]):
            message = world.told[member][read[member]]
            read[member] += 1
            match message:
                case msg.Interrupt():
                    assert message.iteration == iteration[member]
                    if state[member] != "arrived":
                        state[member] = "interrupted" if state[member] != "enter" else "enter"
                case msg.Release():
                    assert message.iteration == iteration[member]
                    assert rank[member] not in message.terminated
                    before = sum(dead < rank[member] for dead in message.terminated)
                    rank[member] -= before
                    size_now[member] += message.joined - len(message.terminated)
                    iteration[member] += 1
                    state[member] = "enter"
                case msg.Admitted():
                    release = message.release
                    rank[member] = message.rank - len(release.terminated)
                    size_now[member] = message.world_size - len(release.terminated)
                    iteration[member] = release.iteration + 1
                    state[member] = "enter"
                case msg.Done() | msg.Dismiss():
                    state[member] = "done"

    for _ in range(2000):
        if not alive or all(state[member] == "done" for member in alive):
            break
        member = chance.choice(sorted(alive))
        hear(member)
        now = iteration[member]
        if faults and chance.random() < 0.1 and state[member] != "done":
            faults -= 1
            if chance.random() < 0.4:
                alive.discard(member)
                world.hub.lose(member, "TERMINATED", "")
                replaced.append(initial[member])
                continue
            if replaced and world.hub.phase is not Phase.DONE:
                place = replaced.pop()
                new = late(world, place)
                alive.add(new)
                initial[new], state[new], iteration[new] = place, "queued", -1
                continue
            if state[member] == "run":
                world.hub.handle(member, msg.Fault(now, "EXCEPTION"))
                state[member] = "interrupted"
                continue
        match state[member]:
            case "enter":
                world.hub.handle(member, msg.Enter(now, rank[member], size_now[member]))
                state[member] = "run"
                # It may have been interrupted before it entered.
                told = world.told[member]
                if any(isinstance(m, msg.Interrupt) and m.iteration == now for m in told):
                    state[member] = "interrupted"
            case "run":
                world.hub.handle(member, msg.Complete(now))
                state[member] = "completed"
            case "interrupted":
                world.hub.handle(member, msg.Arrive(now))
                if state[member] == "interrupted":
                    state[member] = "arrived"
    assert all(state[member] == "done" for member in alive)
    alive -= {member for member in alive if iteration[member] < 0}
    assert len({iteration[member] for member in alive}) <= 1
    assert sorted(rank[member] for member in alive) == sorted({rank[member] for member in alive})


def test_a_wait_is_answered_when_the_last_of_its_keys_is_set() -> None:
    store, answers = HubStore(), []
    store.handle(msg.StoreRequest("wait", ("a", "b")), answers.append)
    store.handle(msg.StoreRequest("set", ("a",), (b"1",)), lambda reply: None)
    assert answers == []
    store.handle(msg.StoreRequest("append", ("b",), (b"2",)), lambda reply: None)
    assert answers == [msg.StoreReply()]


def test_a_wait_of_somebody_who_is_gone_is_forgotten() -> None:
    store, answers = HubStore(), []
    store.handle(msg.StoreRequest("wait", ("a",)), answers.append, "asker")
    store.forget("asker")
    store.handle(msg.StoreRequest("set", ("a",), (b"1",)), lambda reply: None)
    assert answers == []


def test_the_store_adds_compares_deletes_and_says_what_is_wrong() -> None:
    store = HubStore()

    def ask(operation: str, *keys: str, values: tuple[bytes, ...] = (), amount: int = 0) -> msg.StoreReply:
        answers: list[msg.StoreReply] = []
        store.handle(msg.StoreRequest(operation, keys, values, amount), answers.append)
        (reply,) = answers
        return reply

    assert ask("add", "n", amount=2).number == 2
    assert ask("add", "n", amount=-5).number == -3
    ask("set", "text", values=(b"x",))
    assert "no number" in ask("add", "text", amount=1).error
    ask("add", "large", amount=2**62)
    assert "64 bits" in ask("add", "large", amount=2**62).error
    assert ask("delete", "large").number == 1
    assert ask("compare_set", "text", values=(b"y", b"z")).values == (b"x",)
    assert ask("compare_set", "text", values=(b"x", b"z")).values == (b"z",)
    assert ask("compare_set", "new", values=(b"", b"1")).values == (b"1",)
    assert "no key 'gone'" in ask("get", "gone").error
    assert ask("check", "n", "gone").number == 0
    ask("set", "part/a", "part/b", values=(b"", b""))
    assert ask("delete_prefix", "part/").number == 2
    assert ask("delete", "n", "gone").number == 1
    assert ask("count").number == 2
    assert "no operation" in ask("fly").error


def test_numbers_that_are_wrong_end_all_ranks_instead_of_restarting_them_for_ever() -> None:
    world = World(2)
    world.enter_all({0: 0, 1: 0})
    assert isinstance(world.last(0), msg.Dismiss)
    assert world.last(1) == world.last(0)
    assert "1 to none" in world.last(1).why


# --- the hub on the network: whoever reaches its port ---------------------------------------------------


class Served:
    """A hub on a loop of this thread."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.server = HubServer(self.selector, msg.Host("right", 1), 60.0)

    def connect(self, sent: bytes = b"") -> socket.socket:
        client = socket.create_connection(("localhost", self.server.port), timeout=250)
        client.sendall(sent)
        return client

    def turn(self) -> None:
        for key, _ in self.selector.select(0):
            key.data()

    def turn_until_ready(self, client: socket.socket) -> None:
        while not select.select([client], [], [], 0.001)[0]:
            self.turn()

    def close(self) -> None:
        self.server.close()
        self.selector.close()


@pytest.fixture
def served() -> Iterator[Served]:
    hub = Served()
    yield hub
    hub.close()


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "sent",
    [
        msg.frame(msg.Join("wr\u00f6ng", 0, 1)),
        msg.frame(msg.StoreJoin("")),
        msg.frame(msg.Beat()),
        _framed(b"\x95\xa4Join\xa0\x01\x01" + b"\x91" * 4000 + b"\x01"),  # lists in lists in lists
        _framed(b"\x94\xa4Join\xa1\xff\x01\x01"),  # no UTF-8
        struct.pack("<I", 1_000_000),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_who_does_not_know_the_token_is_cut_off_and_disturbs_nobody(served: Served, sent: bytes) -> None:
    with served.connect(sent) as stranger, served.connect(msg.frame(msg.Join("right", 0, 1))) as member:
        served.turn_until_ready(stranger)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        served.turn_until_ready(member)
        assert member.recv(100) == msg.frame(msg.Joined())


def test_connections_that_say_nothing_keep_nobody_out(served: Served) -> None:
    """They are the first to go when there are no descriptors left, and go by themselves in the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    silent = [served.connect() for _ in range(3)]
    served.turn()
    member = served.connect(msg.frame(msg.Join("right", 0, 1)))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (member.fileno() + 1, hard))
        served.turn_until_ready(member)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert member.recv(100) == msg.frame(msg.Joined())
    for client in (*silent, member):
        client.close()


def test_the_hub_outlives_requests_of_ranks_that_it_cannot_answer(served: Served) -> None:
    """No key, no values, and an answer that is larger than a message may be."""
    with served.connect(msg.frame(msg.StoreJoin("right"))) as client:
        large = b"x" * (msg.MAX_FRAME_BYTES // 2)
        for number in range(3):
            client.settimeout(0.001)
            unsent = memoryview(msg.frame(msg.StoreRequest("set", (str(number),), (large,))))
            while unsent:
                with contextlib.suppress(TimeoutError):
                    unsent = unsent[client.send(unsent) :]
                served.turn()
            client.settimeout(60)
            assert _answer(served, client) == msg.StoreReply()
        for request, what in [
            (msg.StoreRequest("add"), "add: "),
            (msg.StoreRequest("compare_set", ("0",)), "compare_set: "),
            (msg.StoreRequest("get", ("0", "1", "2")), "are accepted"),
        ]:
            client.sendall(msg.frame(request))
            assert what in _answer(served, client).error


def _answer(served: Served, client: socket.socket) -> msg.StoreReply:
    reader: msg.FrameReader[msg.StoreReply] = msg.FrameReader(msg.StoreReply)
    while True:
        served.turn_until_ready(client)
        for reply in reader.feed(client.recv(65536)):
            return reply


def test_a_message_that_nobody_takes_is_refused_where_it_is_sent() -> None:
    with pytest.raises(msg.BadFrameError, match="67108864 are accepted"):
        msg.frame(msg.StoreRequest("set", ("key",), (bytes(msg.MAX_FRAME_BYTES),)))


def test_a_peer_that_has_become_unreachable_costs_its_own_stream_only() -> None:
    """Its node is gone: send(2) may say so long after, by any error."""

    class Unreachable(socket.socket):
        def send(self, *arguments: object) -> int:
            raise next(errors)

    errors = iter([BlockingIOError(), OSError(errno.EHOSTUNREACH, "")])
    here, there = socket.socketpair()
    with selectors.DefaultSelector() as selector, there:
        ours = Unreachable(fileno=here.detach())
        ended: list[str] = []
        stream = Stream(selector, ours, msg.FromHub, lambda message: None, ended.append)
        stream.send(msg.Beat())
        for key, _ in selector.select(0):
            key.data()
        assert not stream.has_unsent
        there.close()
        for key, _ in selector.select(60):
            key.data()
        assert ended == ["the connection was closed"]


def test_the_reason_that_is_told_is_not_one_that_follows_from_another() -> None:
    closed = msg.Record(1, "EXCEPTION", "RuntimeError: Connection closed\nby peer")
    assert describe_with_reason((closed,)).endswith("{1} (rank 1: RuntimeError: Connection closed by peer)")
    ended = msg.Record(0, "TERMINATED", "its process ended")
    assert describe_with_reason((closed, ended)).endswith("{0} (rank 0: its process ended)")
    assert describe_with_reason((msg.Record(2, "EXCEPTION"),)).endswith("affecting ranks {2}")
