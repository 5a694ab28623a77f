"""``RankMonitorClient`` where something is missing: the monitor, the agent, or a call before."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvrx_slurm.fault_tolerance import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from nvrx_slurm.wire.page import PAGE_VARIABLE, HeartbeatPage
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE, Control, decode_request, is_acceptable
from nvrx_slurm.wire.timeouts import MONITORING_VARIABLE, HeartbeatTimeouts, Monitoring, SectionTimeouts

SHUT_DOWN = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "enough")

USES: list[tuple[str, Callable[[RankMonitorClient], object]]] = [
    ("send_heartbeat", lambda client: client.send_heartbeat()),
    ("report_checkpoint_saved", lambda client: client.report_checkpoint_saved(5)),
    ("report_checkpoint_loaded", lambda client: client.report_checkpoint_loaded(5)),
    ("report_straggler", lambda client: client.report_straggler(1, "step", 0.5, 2.0, 2, 3)),
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


@pytest.mark.parametrize(
    ("name", "use"),
    [
        *USES,
        ("send_workload_control_request", lambda client: client.send_workload_control_request(SHUT_DOWN)),
    ],
)
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


@pytest.mark.parametrize(
    "given",
    [
        (-1, "step", 0.5, 2.0, 2, 3),
        ("5", "step", 0.5, 2.0, 2, 3),
        (1, "a\nb", 0.5, 2.0, 2, 3),
        (1, "step", 1.5, 2.0, 2, 3),
        (1, "step", math.nan, 2.0, 2, 3),
        (1, "step", 0.5, math.inf, 2, 3),
        (1, "step", 0.5, None, 2, 3),
        (1, "step", 0.5, 2.0, 4, 3),
        (1, "step", 0.5, 2.0, 0, 3),
    ],
)
def test_a_straggler_that_can_be_none_is_refused(
    environment: pytest.MonkeyPatch, given: tuple[Any, ...]
) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match=r"^report_straggler got .*a section's name, a score"):
        client.report_straggler(*given)
    client.shutdown_workload_monitoring()


@pytest.mark.parametrize("layer", ["", "x" * 65, "a\nb", "\ud800", None, 5])
def test_a_layer_that_is_no_name_is_refused(environment: pytest.MonkeyPatch, layer: str) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="as layer: 1 to 64 bytes"):
        client.report_checkpoint_saved(5, layer)
    client.shutdown_workload_monitoring()


# --- requests for the whole job ----------------------------------------------------------------------


@pytest.fixture
def requests(environment: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[object], list[Control]]]:
    """Sends a request, and returns all such that have arrived at an agent's socket."""
    path = tmp_path / "requests.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        environment.setenv(SOCKET_VARIABLE, str(path))
        client = RankMonitorClient()
        client.init_workload_monitoring()
        connection, _ = listener.accept()

        def send(request: object) -> list[Control]:
            client.send_workload_control_request(request)  # type: ignore[arg-type]
            client.shutdown_workload_monitoring()
            said = iter(lambda: connection.recv(65536), b"")
            return [asked for asked in map(decode_request.decode, said) if isinstance(asked, Control)]

        with connection:
            yield send


def test_a_request_for_the_whole_job_reaches_the_agent(requests: Callable[[object], list[Control]]) -> None:
    sent = Control(rank=3, cycle=1, action=WorkloadAction.ShutdownWorkload, description="enough")
    assert requests(SHUT_DOWN) == [sent]
    assert is_acceptable(sent)


def test_to_continue_asks_for_nothing(requests: Callable[[object], list[Control]]) -> None:
    assert requests(WorkloadControlRequest(WorkloadAction.Continue)) == []


@pytest.mark.parametrize("text", ["two\nlines", "\x1b[31mred", "x" * 10_000, "\u2028" * 3, "ü" * 501])
def test_its_description_is_cut_to_what_a_terminal_can_show(
    requests: Callable[[object], list[Control]], text: str
) -> None:
    (asked,) = requests(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, text))
    assert is_acceptable(asked)
    assert asked.description[:2] == " ".join(text.split())[:2].replace("\x1b", "?")


@pytest.mark.parametrize("description", ["x" * 501, "two\nlines", "\x1b[31mred"])
def test_an_agent_passes_on_no_other_description(description: str) -> None:
    """A rank may write to the socket by itself."""
    action = WorkloadAction.ExcludeThisNode
    assert not is_acceptable(Control(rank=3, cycle=1, action=action, description=description))


@pytest.mark.parametrize("request_", ["shutdown", WorkloadAction.ShutdownWorkload, None])
def test_what_is_no_request_is_refused(environment: pytest.MonkeyPatch, request_: object) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="a WorkloadControlRequest is accepted"):
        client.send_workload_control_request(request_)  # type: ignore[arg-type]
    client.shutdown_workload_monitoring()


def test_the_numbers_of_the_actions_are_those_that_users_know() -> None:
    assert [(action.name, int(action)) for action in WorkloadAction] == [
        ("Continue", 0),
        ("ExcludeThisNode", 1),
        ("ShutdownWorkload", 2),
    ]


def test_without_a_monitor_a_request_is_told_to_be_in_vain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(PAGE_VARIABLE, raising=False)
    client = RankMonitorClient()
    client.init_workload_monitoring()
    with caplog.at_level(logging.WARNING):
        client.send_workload_control_request(SHUT_DOWN)
    assert "nobody does what was asked for" in caplog.text
