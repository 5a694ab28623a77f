"""The agent's watch over its node: with a helper that is a script, and with the real one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.agent import health_watch
from nvrx_slurm.agent.health_watch import HealthWatch, verdict_of
from nvrx_slurm.health.report import HealthReport
from nvrx_slurm.health.result import CheckResult, Status
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.wire import messages as msg

HELPER = """
import json, os, sys, time
looks = 0
for _ in sys.stdin:
    looks += 1
    open(FOLDER + "/looks", "a").write(f"{{os.getpid()}}\\n")
    {body}
    print(json.dumps({{"report": report, "interval_s": INTERVAL}}), flush=True)
"""


def report(*results: CheckResult, seconds: float = 0.1) -> HealthReport:
    return HealthReport("n1", Stage.RESTART, "boot", 1.0, seconds, results, {})


BROKEN = CheckResult(
    Status.FAIL, "fallen off the bus", "s", "gpu 3", "reboot", node_lost=True, check="gpu-lost"
)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a test's coroutine with a watch whose helper does what the test says after each request."""

    def run(body: str, test: Callable[..., Awaitable[None]], interval_s: float = 60.0) -> None:
        healthy, broken = (json.loads(r.to_json()) for r in (report(), report(BROKEN)))
        for document in (healthy, broken):
            del document["schema"], document["status"]
        script = textwrap.dedent(HELPER).format(body=body.replace("\n", "\n    "))
        head = (
            f"FOLDER, INTERVAL = {str(tmp_path)!r}, {interval_s}\nHEALTHY, BROKEN = {healthy!r}, {broken!r}\n"
        )
        (tmp_path / "helper.py").write_text(head + script)
        command = [sys.executable, str(tmp_path / "helper.py")]
        monkeypatch.setattr(health_watch, "command_for", lambda *_: command)
        said: list[msg.AgentMessage] = []

        async def main() -> None:
            watching = HealthWatch("", tmp_path / "state", dict(os.environ), said.append)
            try:
                await test(watching, said)
            finally:
                await watching.close()

        asyncio.run(main())

    return run


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def looks(tmp_path: Path) -> list[str]:
    return (tmp_path / "looks").read_text().split() if (tmp_path / "looks").exists() else []


def test_the_first_verdict_is_given_and_a_change_is_told(watch: Callable[..., Any]) -> None:
    async def test(watching: HealthWatch, said: list[msg.AgentMessage]) -> None:
        assert await watching.first_verdict() == msg.NodeHealth(findings=[], seconds=0.1)
        assert said == []
        watching.refresh()
        await watching.settle(30.0)
        assert said == [verdict_of(report(BROKEN))]
        watching.refresh()
        await watching.settle(30.0)
        assert len(said) == 1, "the same again is not told"

    watch("report = HEALTHY if looks == 1 else BROKEN", test)


def test_a_first_verdict_that_takes_too_long_is_told_when_it_is_there(
    watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(health_watch, "FIRST_VERDICT_S", 0.05)

    async def test(watching: HealthWatch, said: list[msg.AgentMessage]) -> None:
        assert await watching.first_verdict() is None
        (tmp_path / "go").touch()
        await until(lambda: bool(said))
        assert said == [verdict_of(report(BROKEN))]

    wait = "while not os.path.exists(FOLDER + '/go'): time.sleep(0.01)\n"
    watch(wait + "report = BROKEN", test)


def test_nobody_waits_longer_than_he_says(watch: Callable[..., Any]) -> None:
    async def test(watching: HealthWatch, said: list[msg.AgentMessage]) -> None:
        await watching.first_verdict()
        watching.refresh()
        began = time.monotonic()
        await watching.settle(0.2)
        assert 0.1 < time.monotonic() - began < 50.0
        await watching.settle(-1.0)

    watch("report = HEALTHY if looks == 1 else time.sleep(60)", test)


def test_the_node_is_looked_at_now_and_then_beside_training(
    watch: Callable[..., Any], tmp_path: Path
) -> None:
    async def test(watching: HealthWatch, said: list[msg.AgentMessage]) -> None:
        await watching.first_verdict()
        await until(lambda: len(looks(tmp_path)) >= 4)
        assert len(set(looks(tmp_path))) == 1, "one helper for all"

    watch("report = HEALTHY", test, interval_s=0.05)


def test_a_helper_that_dies_holds_nobody_up_and_is_replaced(
    watch: Callable[..., Any], tmp_path: Path
) -> None:
    async def test(watching: HealthWatch, said: list[msg.AgentMessage]) -> None:
        await watching.first_verdict()
        watching.refresh()
        await watching.settle(30.0)
        watching.refresh()
        await watching.settle(30.0)
        await until(lambda: len(set(looks(tmp_path))) == 2)
        assert said == []

    watch("report = HEALTHY if looks == 1 else os._exit(3)", test)


@pytest.mark.parametrize("output", ["not JSON", "{}", '{"error": "health.yaml: not YAML"}', "[]"])
def test_a_helper_that_talks_nonsense_or_gives_up_says_nothing_of_the_node(
    watch: Callable[..., Any], output: str
) -> None:
    async def test(watching: HealthWatch, said: list[msg.AgentMessage]) -> None:
        assert await watching.first_verdict() is None
        watching.refresh()
        await watching.settle(1.0)
        assert said == []

    watch(f"print({output!r}, flush=True); sys.exit()\nreport = None", test)


def test_closing_ends_the_helper(watch: Callable[..., Any], tmp_path: Path) -> None:
    async def test(watching: HealthWatch, said: list[msg.AgentMessage]) -> None:
        await watching.first_verdict()

    watch("report = HEALTHY", test)
    (pid,) = looks(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_result_that_comes_with_a_cancellation_does_not_swallow_it() -> None:
    """asyncio.wait_for does that before Python 3.12, and an agent would then never end."""

    async def main() -> None:
        event = asyncio.Event()
        waiting = asyncio.create_task(health_watch._within(30.0, event.wait()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        event.set()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    asyncio.run(main())


def test_the_real_helper_looks_at_this_machine_and_keeps_a_baseline(tmp_path: Path) -> None:
    scripts = tmp_path / "checks.d"
    scripts.mkdir(mode=0o755)
    (scripts / "x").write_text(f"#!/bin/sh\ncat {tmp_path}/broken 2>/dev/null && exit 2; echo fine\n")
    (scripts / "x").chmod(0o755)
    config = tmp_path / "health.yaml"
    config.write_text(f"checks: {{site-scripts: {{directory: {scripts}}}}}\n")
    config.chmod(0o600)
    said: list[msg.AgentMessage] = []

    async def main() -> None:
        watching = HealthWatch(str(config), tmp_path / "state", dict(os.environ), said.append)
        try:
            watching.refresh()
            await watching.settle(30.0)
            first = await watching.first_verdict()
            assert first is not None
            assert not [finding for finding in first.findings if finding.failed]
            await until((tmp_path / "state" / "baseline.json").exists)
            (tmp_path / "broken").write_text("the fan is off\n")
            watching.refresh()
            await watching.settle(30.0)
        finally:
            await watching.close()

    asyncio.run(main())
    (health,) = said
    assert isinstance(health, msg.NodeHealth)
    finding = health.findings[0]
    assert (finding.check, finding.scope, finding.failed) == ("site-scripts", "script x", True)
    assert finding.evidence == "the fan is off"


def test_a_verdict_names_failures_first_and_not_everything() -> None:
    warned = [CheckResult(Status.WARN, "w" * 999, "s", check=f"c{n}") for n in range(40)]
    health = verdict_of(report(*warned, BROKEN, CheckResult(Status.OK, "fine", check="d")))
    assert health.findings[0].check == "gpu-lost"
    assert len(health.findings) == 16
    assert all(len(finding.evidence) <= 300 for finding in health.findings)
