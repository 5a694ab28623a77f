"""Asking whether to stop, from processes without a client; workers that outlive the signals of a stop."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm import fault_tolerance
from nvrx_slurm.fault_tolerance import RankMonitorClient, stopping
from nvrx_slurm.wire.page import PAGE_VARIABLE, AgentPage, HeartbeatPage

PATIENCE_S = 60


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentPage]:
    path = tmp_path / "rank.page"
    made = HeartbeatPage.create(path)
    monkeypatch.setenv(PAGE_VARIABLE, str(path))
    yield made
    made.close()


def answer(pipe: multiprocessing.connection.Connection) -> None:
    while pipe.recv():
        pipe.send(fault_tolerance.should_stop())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loader_worker_hears_the_request_too(page: AgentPage, method: str) -> None:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    worker = context.Process(target=answer, args=(theirs,))
    worker.start()
    try:
        for asked in (False, True):
            if asked:
                page.request_stop()
            ours.send(True)
            assert ours.poll(PATIENCE_S)
            assert ours.recv() is asked
            assert fault_tolerance.should_stop() is asked
        ours.send(False)
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
    finally:
        worker.kill()
        worker.join()


def test_without_an_agent_or_with_a_page_that_is_gone_nobody_asks(
    page: AgentPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.request_stop()
    assert fault_tolerance.should_stop()
    monkeypatch.setenv(PAGE_VARIABLE, str(tmp_path / "gone"))
    assert not fault_tolerance.should_stop()
    monkeypatch.delenv(PAGE_VARIABLE)
    assert not fault_tolerance.should_stop()


@pytest.mark.parametrize("sig", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_was_named_is_a_request(sig: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PAGE_VARIABLE, raising=False)
    monkeypatch.setattr(stopping, "_signalled", False)
    before = {each: signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        fault_tolerance.stop_on_signals()
        client = RankMonitorClient()
        assert not fault_tolerance.should_stop()
        assert not client.should_stop()
        signal.raise_signal(sig)
        assert fault_tolerance.should_stop()
        assert client.should_stop()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


WORKER = """
import signal, sys
from nvrx_slurm.fault_tolerance import outlive_stop_signals, stopping
stopping.WORKER_GRACE_S = int(sys.argv[1])
outlive_stop_signals(0)
print("ready", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
signal.pause()
"""


def started(grace_s: int) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(grace_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    return worker


def test_a_worker_goes_on_after_every_signal_to_stop() -> None:
    with started(60) as worker:
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                worker.send_signal(sig)
                print(sig.name, file=worker.stdin, flush=True)
                assert worker.stdout.readline() == f"{sig.name}\n"
        finally:
            worker.kill()


def test_a_worker_that_nobody_ends_does_so_itself() -> None:
    with started(1) as worker:
        try:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == -signal.SIGALRM
        finally:
            worker.kill()


@pytest.mark.parametrize("asked", [False, True])
def test_the_example_of_the_document_loads_until_it_is_asked_to_stop(page: AgentPage, asked: bool) -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.S | re.M)
    (example,) = (block for block in blocks if "DataLoader" in block)
    if asked:
        page.request_stop()
    done = subprocess.run(
        [sys.executable, "-c", f"{example}\nprint(int(batch))"], capture_output=True, text=True, timeout=250
    )
    assert done.stdout == ("0\n" if asked else "7\n"), done.stderr
