"""``RankMonitorClient`` where something is missing: the monitor, the agent, or a call before."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.wire.page import PAGE_VARIABLE, HeartbeatPage
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE
from nvrx_slurm.wire.timeouts import MONITORING_VARIABLE, HeartbeatTimeouts, Monitoring, SectionTimeouts

USES: list[tuple[str, Callable[[RankMonitorClient], object]]] = [
    ("send_heartbeat", lambda client: client.send_heartbeat()),
    ("report_checkpoint_saved", lambda client: client.report_checkpoint_saved(5)),
    ("report_checkpoint_loaded", lambda client: client.report_checkpoint_loaded(5)),
    ("start_section", lambda client: client.start_section("step")),
    ("end_section", lambda client: client.end_section("step")),
    ("end_all_sections", lambda client: client.end_all_sections()),
]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """The environment of rank 3 in cycle 1, with an agent that listens."""
    page, listener = (
        HeartbeatPage.create(tmp_path / "page"),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    )
    listener.bind(str(tmp_path / "ranks.sock"))
    listener.listen()
    monitoring = Monitoring(heartbeat=HeartbeatTimeouts(), section=SectionTimeouts())
    for name, value in {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": "1",
        PAGE_VARIABLE: str(tmp_path / "page"),
        SOCKET_VARIABLE: str(tmp_path / "ranks.sock"),
        MONITORING_VARIABLE: msgspec.json.encode(monitoring).decode(),
    }.items():
        monkeypatch.setenv(name, value)
    yield monkeypatch
    listener.close()
    page.close()


@pytest.mark.parametrize(("name", "use"), USES)
def test_every_call_needs_the_first(name: str, use: Callable[[RankMonitorClient], object]) -> None:
    with pytest.raises(RankMonitorClientError, match=f"^{name} needs init_workload_monitoring first$"):
        use(RankMonitorClient())


def test_the_first_call_is_made_once(environment: pytest.MonkeyPatch) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with pytest.raises(
        RankMonitorClientError, match="called before; call shutdown_workload_monitoring first"
    ):
        client.init_workload_monitoring()
    client.shutdown_workload_monitoring()
    client.init_workload_monitoring()
    client.shutdown_workload_monitoring()
    client.shutdown_workload_monitoring()
    assert not client.is_initialized


def test_outside_of_nvrx_srun_nothing_is_done_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(PAGE_VARIABLE, raising=False)
    client = RankMonitorClient()
    with caplog.at_level(logging.INFO, logger="nvrx_slurm"):
        client.init_workload_monitoring()
        for _, use in USES:
            use(client)
    assert client.should_stop() is False
    assert client.is_initialized
    assert caplog.messages == [f"no rank monitor here ({PAGE_VARIABLE} is not set): heartbeats do nothing"]
    client.shutdown_workload_monitoring()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", None),
        ("RANK", "three"),
        ("LOCAL_RANK", None),
        ("TORCHELASTIC_RESTART_COUNT", None),
        (PAGE_VARIABLE, "/nowhere/page"),
        (PAGE_VARIABLE, "/dev/null"),
        (SOCKET_VARIABLE, None),
        (SOCKET_VARIABLE, "/nowhere/ranks.sock"),
        (MONITORING_VARIABLE, None),
        (MONITORING_VARIABLE, "{"),
        (MONITORING_VARIABLE, '{"heartbeat": 5}'),
    ],
)
def test_a_monitor_that_cannot_be_reached_is_an_error_and_leaks_nothing(
    environment: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    if value is None:
        environment.delenv(name)
    else:
        environment.setenv(name, value)
    client = RankMonitorClient()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(RankMonitorClientError, match="cannot reach this rank's monitor"):
        client.init_workload_monitoring()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not client.is_initialized


def test_an_agent_that_is_gone_does_not_stop_the_training(
    environment: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = tmp_path / "another.sock"
    listener.bind(str(path))
    listener.listen()
    environment.setenv(SOCKET_VARIABLE, str(path))
    client = RankMonitorClient()
    client.init_workload_monitoring()
    listener.close()
    for step in range(3):
        client.send_heartbeat(step=step)
        client.report_checkpoint_saved(step)
    assert [message.partition(":")[0] for message in caplog.messages] == ["the rank monitor is gone"]
    client.shutdown_workload_monitoring()


@pytest.mark.parametrize(
    "step", [2**63, -(2**63) - 1, 2**70, 10**5000, True, 1.5, math.nan, "5", b"5", [5]], ids=type
)
def test_a_step_that_is_no_integer_of_64_bits_is_refused(
    environment: pytest.MonkeyPatch, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    for call in (client.send_heartbeat, client.report_checkpoint_saved, client.report_checkpoint_loaded):
        with pytest.raises(
            RankMonitorClientError, match=f"^{call.__name__} got .* as step: an integer of 64"
        ):
            call(step)
    with pytest.raises(RankMonitorClientError, match="got None as step"):
        client.report_checkpoint_saved(None)  # type: ignore[arg-type]
    client.send_heartbeat(2**63 - 1)
    client.report_checkpoint_saved(-(2**63))
    assert caplog.messages == []
    client.shutdown_workload_monitoring()


@pytest.mark.parametrize("layer", ["", "x" * 65, "a\nb", "\ud800", None, 5])
def test_a_layer_that_is_no_name_is_refused(environment: pytest.MonkeyPatch, layer: str) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="as layer: 1 to 64 bytes"):
        client.report_checkpoint_saved(5, layer)
    client.shutdown_workload_monitoring()
