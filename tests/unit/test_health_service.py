"""The node's own health daemon, and the site's scripts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from health_world import run, status, told
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.health.node import JobContext, Node
from nvrx_slurm.health.node_service_rpc import (
    METHOD,
    ServiceAnswer,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from nvrx_slurm.health.programs import RealPrograms
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.testing.health import fake_node

GOOD = ServiceAnswer(True, 0, json.dumps({"fail_count": 0}), "")


@contextlib.contextmanager
def daemon(socket: Path, reply: Callable[[list[str]], bytes]) -> Iterator[None]:
    """A real gRPC server on a Unix socket, as the daemon is one."""

    def answer(request: bytes, context: object) -> bytes:
        return reply(decode_request(request))

    service, method = METHOD.strip("/").split("/")
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    assert server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = fake_node(tmp_path, programs=RealPrograms())
    node.tree.at("/run").mkdir()
    return node


def ask(node: Node, answer: ServiceAnswer | bytes) -> list[tuple[str, str, str]]:
    data = answer if isinstance(answer, bytes) else encode_answer(answer)
    with daemon(node.tree.at("/run/hc.sock"), lambda args: data):
        return told("node-service", node, socket="/run/hc.sock")


def test_without_a_configured_socket_the_daemon_is_skipped(node: Node) -> None:
    assert status("node-service", node) == "skip"


def test_the_daemon_gets_the_configured_arguments(node: Node) -> None:
    got: list[list[str]] = []

    def reply(args: list[str]) -> bytes:
        got.append(args)
        return encode_answer(GOOD)

    with daemon(node.tree.at("/run/hc.sock"), reply):
        assert status("node-service", node, socket="/run/hc.sock", args=("--no-slurm", "grüße")) == "ok"
    assert got == [["--no-slurm", "grüße"]]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (GOOD, ("ok", "success")),
        (
            ServiceAnswer(False, 3, "", "gpu 3 is bad\nmore"),
            ("fail", "gpu 3 is bad"),
        ),
        (ServiceAnswer(False, 3, "", ""), ("fail", "exit code 3")),
        (ServiceAnswer(True, 0, '{"fail_count": 2}', "two"), ("fail", "2 failed: two")),
        (ServiceAnswer(True, 0, "no JSON", ""), ("warn", "success, but its output has no fail_count")),
        (
            ServiceAnswer(True, 0, '{"fail_count": "x"}', ""),
            ("warn", "success, but its output has no fail_count"),
        ),
    ],
)
def test_the_daemons_answer_decides(node: Node, answer: ServiceAnswer, expected: tuple[str, str]) -> None:
    assert ask(node, answer) == [(expected[0], "node", expected[1])]


def test_w15_a_daemon_that_appears_later_is_found(node: Node) -> None:
    assert told("node-service", node, socket="/run/hc.sock") == [
        ("warn", "node", "the daemon's socket is not there")
    ]
    assert ask(node, ServiceAnswer(False, 1, "", "bad"))[0][0] == "fail"


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x0b\x00", b"\x1a\x7fshort", b"\x08"])
def test_w15_a_transport_error_is_told_and_drains_nobody(node: Node, garbage: bytes) -> None:
    ((what, _, evidence),) = ask(node, garbage)
    assert what == "warn"
    assert "does not answer: no HealthCheckResponse" in evidence


def test_w15_a_daemon_that_is_gone_is_a_warning(node: Node) -> None:
    node.tree.write("/run/hc.sock", "no socket at all")
    ((what, _, evidence),) = told("node-service", node, socket="/run/hc.sock", answer_s=2.0)
    assert what == "warn"
    assert "UNAVAILABLE" in evidence or "DEADLINE_EXCEEDED" in evidence


@settings(deadline=None)
@given(st.booleans(), st.integers(-(2**31), 2**31 - 1), st.text(), st.text())
def test_answers_survive_the_wire(success: bool, code: int, output: str, error: str) -> None:
    answer = ServiceAnswer(success, code, output, error)
    assert decode_answer(encode_answer(answer)) == answer


@settings(deadline=None)
@given(st.lists(st.text()))
def test_requests_survive_the_wire(args: list[str]) -> None:
    assert decode_request(encode_request(args)) == args


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_with_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode_answer(data)


def test_fields_that_we_do_not_know_are_skipped() -> None:
    # A double in field 9, a float in field 10, bytes in field 11.
    unknown = b"\x49" + b"\0" * 8 + b"\x55" + b"\0" * 4 + b"\x5a\x02hi"
    assert decode_answer(unknown + encode_answer(GOOD)) == GOOD


# --- site scripts ------------------------------------------------------------------------------------


def add_script(node: Node, name: str, body: str) -> None:
    directory = node.tree.at("/etc/nvrx/checks.d")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{body}\n")
    (directory / name).chmod(0o755)


def test_of_what_a_program_prints_the_beginning_is_kept_and_the_rest_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        done = RealPrograms().run(["sh", "-c", "head -c 50000000 /dev/zero | tr '\\0' x; echo end >&2"], 60)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (done.code, done.output, done.errors) == (0, "x" * 65536, "end")
    assert peak < 5_000_000


def test_a_program_that_never_stops_printing_is_ended() -> None:
    with pytest.raises(UnavailableError, match=r"did not end within 0\.2 s"):
        RealPrograms().run(["yes"], 0.2)


def test_the_exit_code_of_a_script_is_its_verdict_and_its_first_line_the_reason(node: Node) -> None:
    assert status("site-scripts", node) == "skip"
    for code, name in enumerate(("00-ok", "10-warn", "20-fail", "30-skip", "40-odd")):
        add_script(node, name, f"echo reason {code}\necho more\nexit {code}")
    assert told("site-scripts", node) == [
        ("ok", "script 00-ok", "reason 0"),
        ("warn", "script 10-warn", "reason 1"),
        ("fail", "script 20-fail", "reason 2"),
        ("skip", "script 30-skip", "reason 3"),
        ("warn", "script 40-odd", "exit code 4 is none of 0 to 3: reason 4"),
    ]


@pytest.mark.parametrize(
    "body",
    ["if then", "grep x /nowhere || exit", "exit 2", "echo only here >&2; exit 2"],
    ids=["syntax error", "grep", "silent", "stderr"],
)
def test_a_script_that_is_broken_itself_fails_no_node(node: Node, body: str) -> None:
    """sh ends with 2 when it can't read its script, and grep when it can't read its file."""
    add_script(node, "10-broken", body)
    ((what, _, why),) = told("site-scripts", node)
    assert (what, why.startswith("exit code 2 without a reason on standard output: ")) == ("warn", True)


def test_a_script_is_told_stage_and_job_and_nothing_of_the_users_environment(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_THE_USER", "x")
    add_script(
        node, "env", "echo $NVRX_STAGE $SLURM_JOB_ID $SLURMD_NODENAME ${LD_PRELOAD_OF_THE_USER:-none}; exit 1"
    )
    node = dataclasses.replace(node, stage=Stage.EPILOG, job=JobContext("77"))
    assert told("site-scripts", node) == [("warn", "script env", "epilog 77 n1 none")]


def test_a_script_that_does_not_end_or_is_killed_is_a_warning(node: Node) -> None:
    add_script(node, "hang", "trap '' TERM; sleep 60")
    add_script(node, "crash", "kill -9 $$")
    found = {scope: (what, evidence) for what, scope, evidence in told("site-scripts", node, answer_s=1.0)}
    assert found["script hang"] == ("warn", "did not end within 1 s")
    assert found["script crash"][0] == "warn"
    assert "signal 9" in found["script crash"][1]


def test_scripts_that_cannot_be_run_are_told(node: Node) -> None:
    add_script(node, "plain", "exit 2")
    directory = node.tree.at("/etc/nvrx/checks.d")
    (directory / "plain").chmod(0o644)
    (directory / "nothing").symlink_to("/nowhere")
    add_script(node, "nonsense", "")
    (directory / "nonsense").write_bytes(b"\x7fELF nonsense")
    (directory / "README.md").write_text("not a script")
    (directory / "old~").write_text("not a script")
    assert [(what, scope) for what, scope, _ in told("site-scripts", node)] == [
        ("warn", "script nothing"),
        ("warn", "script plain"),
        ("warn", "script nonsense"),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone is careful")
def test_root_runs_no_script_that_others_can_write(node: Node) -> None:
    add_script(node, "mine", "exit 0")
    add_script(node, "shared", "exit 2")
    directory = node.tree.at("/etc/nvrx/checks.d")
    (directory / "shared").chmod(0o775)
    assert told("site-scripts", node) == [
        ("warn", "script shared", "not run: others than its owner can write it"),
        ("ok", "script mine", "ok"),
    ]
    directory.chmod(0o777)
    (result,) = run("site-scripts", node)
    assert result.status.value == "warn"
