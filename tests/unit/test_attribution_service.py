"""A site's own service is asked about each cycle; whatever it does, the job goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_slurm import journal
from nvrx_slurm.coordinator import attribution_service
from nvrx_slurm.coordinator.attribution_service import AttributionService
from nvrx_slurm.coordinator.attributor import finding_of
from nvrx_slurm.coordinator.http_request import MAX_ANSWER
from nvrx_slurm.fault_tolerance.config import ConfigError, build_config
from nvrx_slurm.journal import CycleAttributed, FaultKind, Record
from tests.attribution_server import Answer, Server, recommends, says, serving

STARTED = journal.CycleStarted(world_size=2, nodes=["n1"], spares=[])
FAILED = journal.Verdict(action=journal.VerdictAction.RESTART, rule="", why="", kind=FaultKind.EXIT)
Told = list[tuple[CycleAttributed, int]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution_service, "_POLL_S", 0.01)
    monkeypatch.setattr(attribution_service, "_REQUEST_S", 1.0)


def converse(url: str, told: Told, events: Callable[[AttributionService], None]) -> None:
    """Have ``events`` happen, and the job end then."""

    async def run() -> None:
        def tell(found: CycleAttributed, cycle: int) -> None:
            told.append((found, cycle))

        service = AttributionService(url, lambda n: Path(f"/run/cycles/{n}/merged.log"), "ada", "7", tell)
        events(service)
        await service.finish(failed=True)

    asyncio.run(run())


def take(service: AttributionService, cycle: int, *events: journal.Event) -> None:
    for event in events:
        service.take(Record(ts=0.0, job="7", attempt=0, cycle=cycle, event=event))  # type: ignore[arg-type]


def ask(url: str) -> CycleAttributed:
    told: Told = []
    converse(url, told, lambda service: take(service, 3, STARTED, FAILED))
    ((found, cycle),) = told
    assert cycle == 3
    return found


def test_it_is_told_of_a_log_when_its_cycle_begins_and_when_a_fault_has_ended_it() -> None:
    with serving(recommends("RESTART")) as server:
        ask(server.url)
    log = {"log_path": "/run/cycles/3/merged.log", "user": "ada", "job_id": "7"}
    intents = sorted(posted.pop("analysis_intent") for posted in server.posted)
    assert intents == ["progressive", "terminal"]
    assert server.posted == [log, log]
    assert server.asked == [{"log_path": ["/run/cycles/3/merged.log"], "wait": ["false"]}]


def test_it_is_asked_until_it_has_completed() -> None:
    def answer(server: Server) -> tuple[int, bytes]:
        status = "completed" if len(server.asked) == 3 else "pending"
        return says(status=status, recommendation={"action": "STOP"})(server)

    with serving(answer) as server:
        assert ask(server.url).action == "stop"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("said", "action"),
    [("STOP", "stop"), ("RESTART", "restart"), ("CONTINUE", "restart"), ("UNKNOWN", "unknown")],
)
def test_of_what_it_recommends_only_stop_can_end_a_job(said: str, action: str) -> None:
    with serving(recommends(said, reason="no \x1bway", confidence=7)) as server:
        found = ask(server.url)
    assert (found.by, found.action, found.why) == ("service", action, "no  way")
    assert finding_of(found, 3).useless is (said == "STOP")
    assert not found.exclude


def test_a_single_error_is_asked_over() -> None:
    def answer(server: Server) -> tuple[int, bytes]:
        return (503, b"restarting") if len(server.asked) == 1 else recommends("STOP")(server)

    with serving(answer) as server:
        assert ask(server.url).action == "stop"


UNUSABLE: dict[str, tuple[Answer, int, str]] = {
    "it refuses the log": (recommends("STOP"), 403, "403"),
    "it answers no JSON": (lambda _: (200, b"<html>"), 200, "cannot be read"),
    "it answers a list": (lambda _: (200, b"[]"), 200, "cannot be read"),
    "its action is a number": (says(status="completed", recommendation={"action": 3}), 200, "cannot be read"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_answer_that_cannot_be_used_is_told_and_ends_nothing(what: str) -> None:
    answer, post_status, why = UNUSABLE[what]
    with serving(answer, post_status) as server:
        found = ask(server.url)
    assert why in found.failed
    assert not finding_of(found, 3).useless


def test_an_endless_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution_service, "_LAST_S", 0.5)
    told: Told = []
    with serving(lambda _: (200, b" " * (MAX_ANSWER + 1))) as server:
        converse(server.url, told, lambda service: take(service, 3, FAILED))
    assert told == []
    assert server.asked


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A server that takes a connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_service_that_is_silent_or_gone_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attribution_service, "_REQUEST_S", 0.2)
    with silent() as url:
        assert ask(url).failed == f"{url}/logs: no answer within 0.2 s"
    assert "refused" in ask(url).failed.lower() or "connect" in ask(url).failed.lower()


def test_an_analysis_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution_service, "_ANALYSIS_S", 0.2)
    with serving(says(status="pending")) as server:
        assert "not analysed within 0.2 s" in ask(server.url).failed


def test_the_end_of_the_job_does_not_wait_for_it_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution_service, "_LAST_S", 0.1)
    told: Told = []
    with serving(says(status="pending")) as server:
        converse(server.url, told, lambda service: take(service, 0, FAILED))
    assert told == []


def test_the_end_of_a_job_that_was_asked_to_end_does_not_wait_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution_service, "_LAST_S", 1000.0)
    told: Told = []
    asked = journal.StopRequested(signal="SIGTERM")
    with serving(says(status="pending")) as server:
        converse(server.url, told, lambda service: take(service, 0, FAILED, asked))
    assert told == []


def test_of_many_failed_cycles_the_newest_are_asked_about() -> None:
    told: Told = []

    def events(service: AttributionService) -> None:
        for cycle in range(10):
            take(service, cycle, FAILED)

    with serving(recommends("RESTART")) as server:
        converse(server.url, told, events)
    assert sorted(cycle for _, cycle in told) == [6, 7, 8, 9]


@pytest.mark.parametrize(
    "wrong",
    ["localhost", "grpc://h:1", "unix:///s", "http://", "http://h:port", "http://u:p@h", "http://h/?x", 3],
)
def test_an_endpoint_that_cannot_be_asked_is_refused_at_the_start(wrong: object) -> None:
    with pytest.raises(ConfigError, match="a service that runs already: http://HOST:PORT"):
        build_config(("command line", {"attribution_endpoint": wrong}))


def test_an_endpoint_may_have_a_path_and_tls() -> None:
    url = "https://attribution.site:8443/v1"
    assert build_config(("command line", {"attribution_endpoint": url})).attribution_endpoint == url
