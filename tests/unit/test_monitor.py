"""A rank's client and its monitor, joined by a real page and a real socket; only processes are missing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.agent.deadlines import Deadline, deadlines_of
from nvrx_slurm.agent.monitor import RankMonitors
from nvrx_slurm.agent.rank_socket import RankSocket
from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.fault_tolerance.config import build_config
from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.page import PAGE_VARIABLE, HeartbeatPage
from nvrx_slurm.wire.timeouts import MONITORING_VARIABLE, Monitoring

NAMES = ("outer", "inner", "step")


def monitoring(**options: object) -> Monitoring:
    return build_config(("test", options)).monitoring()


class Rank:
    """One rank's client and page, without an agent's event loop."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        self.monitoring = monitoring(**options)
        self.names = list(self.monitoring.section.section)
        self.path = folder / "page"
        self.page = HeartbeatPage.create(self.path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(folder / "sock"))
        self.listener.listen(8)
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.setenv(PAGE_VARIABLE, str(self.path))
        monkeypatch.setenv(rank_channel.SOCKET_VARIABLE, str(folder / "sock"))
        monkeypatch.setenv(MONITORING_VARIABLE, msgspec.json.encode(self.monitoring).decode())
        self.client = RankMonitorClient()

    def deadlines(self) -> list[Deadline]:
        return deadlines_of(self.page.read(len(self.names)), self.names)

    def what(self) -> list[str]:
        return [deadline.what for deadline in self.deadlines()]

    def said(self) -> list[rank_channel.RankRequest]:
        """Everything that the client has told since it connected."""
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        found = []
        with contextlib.suppress(BlockingIOError):
            while data := connection.recv(rank_channel.MAX_REQUEST_BYTES):
                found.append(rank_channel.decode_request.decode(data))
        return found

    def close(self) -> None:
        self.client.shutdown_workload_monitoring()
        self.page.close()
        self.listener.close()


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(**options: object) -> Rank:
        made.append(Rank(tmp_path, monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


SECTIONS = {"outer": 40.0, "inner": 90.0, "step": None}


def test_nothing_runs_before_monitoring_begins_nor_after_it_ends(rank: Callable[..., Rank]) -> None:
    it = rank(rank_section_timeouts=SECTIONS)
    assert it.deadlines() == []
    it.client.init_workload_monitoring()
    it.client.start_section("outer")
    it.client.shutdown_workload_monitoring()
    assert it.deadlines() == []


def test_the_initial_time_out_ends_with_the_first_heartbeat(rank: Callable[..., Rank]) -> None:
    it = rank(initial_rank_heartbeat_timeout=60, rank_heartbeat_timeout=5)
    it.client.init_workload_monitoring()
    assert it.what() == ["no first heartbeat within 60 s of init_workload_monitoring"]
    it.client.send_heartbeat(step=1)
    assert it.what() == ["no heartbeat for 5 s"]


def test_a_script_that_uses_sections_only_owes_no_heartbeat(rank: Callable[..., Rank]) -> None:
    it = rank(rank_section_timeouts=SECTIONS, rank_out_of_section_timeout=7)
    it.client.init_workload_monitoring()
    assert len(it.deadlines()) == 2
    it.client.start_section("outer")
    assert it.what() == ["section 'outer' open for 40 s"]
    it.client.end_section("outer")
    assert it.what() == ["no section open for 7 s"]


def test_w02_every_open_section_is_enforced_not_only_the_last(rank: Callable[..., Rank]) -> None:
    """W2: there the section that was opened last decides alone."""
    it = rank(rank_section_timeouts=SECTIONS)
    it.client.init_workload_monitoring()
    it.client.start_section("outer")
    it.client.start_section("inner")
    it.client.start_section("step")
    assert it.what() == ["section 'outer' open for 40 s", "section 'inner' open for 90 s"]


def test_w05_the_time_out_outside_of_sections_runs_without_any_section_of_a_certain_name(
    rank: Callable[..., Rank],
) -> None:
    """W5: there it runs only once a section called "step" has been opened."""
    it = rank(rank_section_timeouts={"forward": 10}, rank_out_of_section_timeout=3)
    it.client.init_workload_monitoring()
    assert it.what()[0] == "no section open for 3 s"
    it.client.start_section("forward")
    it.client.end_section("forward")
    assert it.what() == ["no section open for 3 s"]


def test_w04_end_all_sections_closes_all(rank: Callable[..., Rank]) -> None:
    """W4: there it does nothing."""
    it = rank(rank_section_timeouts=SECTIONS, rank_out_of_section_timeout=3)
    it.client.init_workload_monitoring()
    for name in NAMES:
        it.client.start_section(name)
    it.client.end_all_sections()
    assert it.what() == ["no section open for 3 s"]
    it.client.end_all_sections()
    for name in NAMES:
        it.client.start_section(name)


def test_sections_may_overlap_and_the_outside_begins_with_the_last_closing(rank: Callable[..., Rank]) -> None:
    it = rank(rank_section_timeouts=SECTIONS, rank_out_of_section_timeout=3)
    it.client.init_workload_monitoring()
    it.client.start_section("outer")
    it.client.start_section("inner")
    it.client.end_section("outer")
    assert it.what() == ["section 'inner' open for 90 s"]
    it.client.end_section("inner")
    assert it.what() == ["no section open for 3 s"]


def test_opening_twice_and_closing_what_is_not_open_are_errors(rank: Callable[..., Rank]) -> None:
    it = rank(rank_section_timeouts=SECTIONS)
    with pytest.raises(RankMonitorClientError, match="needs init_workload_monitoring"):
        it.client.start_section("step")
    it.client.init_workload_monitoring()
    it.client.start_section("step")
    with pytest.raises(RankMonitorClientError, match="'step' is open already"):
        it.client.start_section("step")
    it.client.end_section("step")
    with pytest.raises(RankMonitorClientError, match="'step' is not open"):
        it.client.end_section("step")


def test_a_section_without_a_time_out_of_its_own_is_no_error(rank: Callable[..., Rank]) -> None:
    it = rank(rank_section_timeouts=SECTIONS)
    it.client.init_workload_monitoring()
    it.client.start_section("another")
    it.client.start_section("another")
    it.client.end_section("yet another")


@pytest.mark.parametrize("override", [None, 1])
def test_the_warm_up_time_out_is_for_the_first_openings_of_its_section(
    rank: Callable[..., Rank], override: int | None
) -> None:
    it = rank(
        rank_section_timeouts={"step": 10, "eval": 20},
        rank_section_warmup_timeouts={"step": 100},
        num_warmup_iterations=2,
    )
    it.client.init_workload_monitoring(num_warmup_iters=override)
    seen = []
    for _ in range(4):
        it.client.start_section("step")
        seen += [deadline.timeout_s for deadline in it.deadlines()]
        it.client.end_section("step")
        it.client.start_section("eval")
        assert it.deadlines()[0].timeout_s == 20
        it.client.end_section("eval")
    assert seen == ([100, 100, 10, 10] if override is None else [100, 10, 10, 10])


def test_calculated_time_outs_are_enforced_told_and_saved(rank: Callable[..., Rank]) -> None:
    it = rank(rank_section_timeouts=SECTIONS, rank_out_of_section_timeout=30, safety_factor=4)
    client = it.client
    client.init_workload_monitoring()
    assert not client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
    with pytest.raises(RankMonitorClientError, match="two heartbeats"):
        client.calculate_and_set_hb_timeouts()
    client.send_heartbeat()
    time.sleep(0.01)
    client.send_heartbeat()
    assert client.calculate_and_set_hb_timeouts()
    assert client.hb_timeouts.were_calculated
    assert client.hb_timeouts.subsequent is not None
    assert 0.04 <= client.hb_timeouts.subsequent < 4
    client.start_section("outer")
    time.sleep(0.01)
    client.end_section("outer")
    assert not client.calculate_and_set_section_timeouts(skip_if_not_ready=True)
    assert client.calculate_and_set_section_timeouts(["outer"], calc_out_of_section=False)
    with pytest.raises(RankMonitorClientError, match="'no' is not monitored"):
        client.calculate_and_set_section_timeouts(["no"])
    changed = [said for said in it.said() if isinstance(said, rank_channel.TimeoutsChanged)]
    assert changed[-1].section == client.section_timeouts
    client.start_section("outer")
    assert {d.timeout_ns for d in it.deadlines()} == {
        int(client.hb_timeouts.subsequent * 1e9),
        int((client.section_timeouts.section["outer"] or 0) * 1e9),
    }

    state = client.state_dict()
    client.shutdown_workload_monitoring()
    later = RankMonitorClient()
    later.load_state_dict(state)
    later.init_workload_monitoring()
    assert later.hb_timeouts == client.hb_timeouts
    assert later.section_timeouts == client.section_timeouts
    assert later.state_dict() == state
    later.shutdown_workload_monitoring()


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(RankMonitorClientError, match="not saved time-outs"):
        RankMonitorClient().load_state_dict({"epoch": 3})


def test_without_a_monitor_every_call_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PAGE_VARIABLE, raising=False)
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.send_heartbeat(step=1)
    client.start_section("step")
    client.end_section("step")
    client.end_all_sections()
    assert not client.calculate_and_set_hb_timeouts()
    assert not client.calculate_and_set_section_timeouts()
    assert client.state_dict() == {"current_timeouts": {}}
    client.shutdown_workload_monitoring()


def test_the_client_knows_who_it_is_and_what_it_is_held_to(rank: Callable[..., Rank]) -> None:
    it = rank(rank_section_timeouts=SECTIONS, safety_factor=7)
    it.client.init_workload_monitoring()
    info, cfg = it.client.rank_info, it.client.cfg
    assert info is not None
    assert cfg is not None
    assert (info.global_rank, info.local_rank, info.pid) == (3, 1, os.getpid())
    assert (cfg.safety_factor, cfg.rank_section_timeouts) == (7, SECTIONS)
    assert it.client.section_timeouts.section == SECTIONS


class Watched:
    """A rank with its monitor in an event loop; every stall is noted with its lateness."""

    def __init__(self, it: Rank, folder: Path) -> None:
        self.it = it
        self.stalls: asyncio.Queue[tuple[list[str], float]] = asyncio.Queue()
        self.monitors = RankMonitors({3: it.page}, it.monitoring, self._stalled)
        self.wakeups = 0
        path = folder / "agent.sock"
        os.environ[rank_channel.SOCKET_VARIABLE] = str(path)
        self.socket = RankSocket(path, self._request)

    def _stalled(self, rank: int, late: Sequence[Deadline]) -> None:
        assert rank == 3
        lateness = (time.monotonic_ns() - late[0].at_ns) / 1e9
        self.stalls.put_nowait(([deadline.what for deadline in late], lateness))

    def _request(self, request: rank_channel.RankRequest) -> None:
        if isinstance(request, rank_channel.TimeoutsChanged):
            self.monitors.change(request.rank, request.heartbeat, request.section)
        else:
            self.monitors.watch(request.rank)

    async def stall(self, within: float) -> list[str]:
        what, lateness = await asyncio.wait_for(self.stalls.get(), within)
        assert 0 <= lateness < 20, "none is passed over"
        return what

    def close(self) -> None:
        self.socket.close()
        self.monitors.forget(3)


@pytest.mark.parametrize("wait", [0.0, 0.13, 0.31])
def test_a_section_with_an_earlier_deadline_than_the_armed_one_is_noticed_in_time(
    rank: Callable[..., Rank], tmp_path: Path, wait: float
) -> None:
    async def scenario() -> None:
        it = rank(rank_section_timeouts={"outer": 100, "inner": 0.3}, rank_out_of_section_timeout=60)
        watched = Watched(it, tmp_path)
        try:
            it.client.init_workload_monitoring()
            it.client.start_section("outer")
            await asyncio.sleep(wait)
            it.client.start_section("inner")
            assert await watched.stall(60.0) == ["section 'inner' open for 0.3 s"]
        finally:
            watched.close()

    asyncio.run(scenario())


def test_a_shorter_calculated_time_out_holds_at_once(rank: Callable[..., Rank], tmp_path: Path) -> None:
    async def scenario() -> None:
        it = rank(safety_factor=3)
        watched = Watched(it, tmp_path)
        try:
            it.client.init_workload_monitoring()
            it.client.send_heartbeat()
            await asyncio.sleep(0.05)
            it.client.send_heartbeat()
            await asyncio.sleep(0.05)
            assert it.client.calculate_and_set_hb_timeouts()
            (what,) = await watched.stall(60.0)
            assert what.startswith("no heartbeat for ")
        finally:
            watched.close()

    asyncio.run(scenario())


def test_a_rank_that_beats_is_never_late_and_costs_few_wake_ups(
    rank: Callable[..., Rank], tmp_path: Path
) -> None:
    async def scenario() -> None:
        it = rank(rank_heartbeat_timeout=0.8, rank_section_timeouts={"step": 0.8})
        watched = Watched(it, tmp_path)
        woken = 0
        watch = watched.monitors.watch

        def counting(each: int) -> None:
            nonlocal woken
            woken += 1
            watch(each)

        watched.monitors.watch = counting  # type: ignore[method-assign]
        try:
            it.client.init_workload_monitoring()
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                it.client.start_section("step")
                it.client.send_heartbeat()
                await asyncio.sleep(0.002)
                it.client.end_section("step")
            assert watched.stalls.empty()
            assert woken <= 10
        finally:
            watched.close()

    asyncio.run(scenario())


def test_w01_a_cycle_that_ends_before_its_first_sign_does_not_spoil_the_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W1: there the first heartbeat of the third cycle is an error, and in every cycle after it."""
    for cycle, beats in enumerate([3, 0, 3, 3]):
        folder = tmp_path / str(cycle)
        folder.mkdir()
        it = Rank(folder, monkeypatch, rank_heartbeat_timeout=5, initial_rank_heartbeat_timeout=6)
        it.client.init_workload_monitoring()
        for _ in range(beats):
            it.client.send_heartbeat()
        assert [deadline.timeout_s for deadline in it.deadlines()] == [5 if beats else 6]
        it.close()
