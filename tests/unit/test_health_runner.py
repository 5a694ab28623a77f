"""The runner: side by side, within one budget, and nothing that a check does gets any further."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvrx_slurm.health import state as state_module
from nvrx_slurm.health import strikes
from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.isolation import call_isolated
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Check, CheckFunction, Need, Settings
from nvrx_slurm.health.report import HealthReport, examine
from nvrx_slurm.health.result import CheckResult, Status, fail, ok, skip, warn
from nvrx_slurm.health.runner import run_checks
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.state import StateDir
from nvrx_slurm.health.strikes import Seen, count
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.health.verdict import ExitCode, exit_code
from nvrx_slurm.testing.health import FakeClock, fake_node


def made(name: str, run: CheckFunction, *, lane: str = "", budget_s: float = 5.0, strikes: int = 1) -> Check:
    return Check(name, run, (Stage.MANUAL,), (Need.SYSFS,), Settings, budget_s, strikes, lane or name, False)


def fine(node: Node, settings: Settings) -> Sequence[CheckResult]:
    return [ok("fine")]


def hang(node: Node, settings: Settings) -> Sequence[CheckResult]:
    # Not even SIGTERM: what is killed here must be killed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def broken(node: Node, settings: Settings) -> Sequence[CheckResult]:
    return [fail("it is broken", "signal", remedy="mend it")]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return fake_node(tmp_path)


def run(node: Node, *checks: Check, budget_s: float = 20.0, config: HealthConfig | None = None):  # type: ignore[no-untyped-def]
    finished = run_checks(checks, node, config or HealthConfig(), budget_s)
    assert [one.check for one in finished] == [check.name for check in checks]
    return {one.check: [(r.status.value, r.evidence) for r in one.results] for one in finished}


def test_results_carry_the_checks_name(node: Node) -> None:
    (one,) = run_checks([made("a", fine)], node, HealthConfig(), 20.0)
    assert one.results == (CheckResult(Status.OK, "fine", check="a"),)


def test_a_check_that_hangs_times_out_as_a_warning_and_holds_up_no_other(node: Node) -> None:
    began = time.monotonic()
    found = run(node, made("hangs", hang, budget_s=0.3), made("fine", fine))
    assert found == {"hangs": [("warn", "timed out after 0.3 s")], "fine": [("ok", "fine")]}
    assert time.monotonic() - began < 30.0


def test_checks_behind_one_that_hangs_in_their_lane_say_so(node: Node) -> None:
    found = run(
        node,
        made("first", fine, lane="gpu"),
        made("hangs", hang, lane="gpu", budget_s=0.3),
        made("later", fine, lane="gpu"),
    )
    assert found["first"] == [("ok", "fine")]
    assert found["later"] == [("warn", "not run: hangs before it timed out after 0.3 s")]


def test_the_budget_ends_everything(node: Node) -> None:
    began = time.monotonic()
    found = run(node, made("a", hang), made("b", hang), made("c", fine), budget_s=3.0)
    assert found["a"] == found["b"] == [("warn", "timed out: the budget of 3 s for all checks is used up")]
    assert found["c"] == [("ok", "fine")]
    assert time.monotonic() - began < 30.0


def test_the_process_of_a_check_that_hangs_is_gone(node: Node, tmp_path: Path) -> None:
    def note_and_hang(node: Node, settings: Settings) -> Sequence[CheckResult]:
        (tmp_path / "pid").write_text(str(os.getpid()))
        return hang(node, settings)

    run(node, made("hangs", note_and_hang, budget_s=1.0))
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no\nsense"), ("warn", "the check itself failed: ValueError: no\nsense")),
        (KeyError("x"), ("warn", "the check itself failed: KeyError: 'x'")),
        (RecursionError(), ("warn", "the check itself failed: RecursionError: ")),
        (UnavailableError("not there", "/sys/x"), ("skip", "/sys/x: not there")),
        (UnavailableError("not there", "/sys/x", expected=True), ("warn", "/sys/x: not there")),
    ],
)
def test_whatever_a_check_raises_becomes_a_result_and_never_a_failure(
    node: Node, error: Exception, expected: tuple[str, str]
) -> None:
    def raises(node: Node, settings: Settings) -> Sequence[CheckResult]:
        raise error

    assert run(node, made("raises", raises))["raises"] == [expected]


@pytest.mark.parametrize("sig", [signal.SIGSEGV, signal.SIGKILL])
def test_a_check_whose_process_dies_is_a_warning(node: Node, sig: signal.Signals) -> None:
    def dies(node: Node, settings: Settings) -> Sequence[CheckResult]:
        faulthandler.disable()
        os.kill(os.getpid(), sig)
        return []

    found = run(node, made("dies", dies, lane="x"), made("behind", fine, lane="x"), made("fine", fine))
    assert found["dies"] == [("warn", f"its process was killed by {sig.name}")]
    assert found["behind"][0][0] == "warn"
    assert found["fine"] == [("ok", "fine")]


def test_a_check_that_is_warn_only_never_fails(node: Node) -> None:
    config = HealthConfig(checks={"broken": Settings(mode="warn-only")})
    (found,) = run(node, made("broken", broken), config=config)["broken"]
    assert found == ("warn", "it is broken (would fail, but this check is warn-only here)")


def test_many_results_of_one_check_arrive_whole(node: Node) -> None:
    def many(node: Node, settings: Settings) -> Sequence[CheckResult]:
        return [ok("x" * 1000, scope=str(n)) for n in range(1000)]

    assert len(run(node, made("many", many))["many"]) == 1000


# --- repetitions -------------------------------------------------------------------------------------


def test_a_failure_that_may_pass_counts_only_when_seen_in_a_row(node: Node) -> None:
    check = made("flaps", broken, strikes=3)
    seen = [_later(node, check) for _ in range(4)]
    assert [result.status.value for result in seen] == ["warn", "warn", "fail", "fail"]
    assert seen[0].evidence == "it is broken (seen 1 of 3 times in a row)"
    _later(node, made("flaps", fine, strikes=3))
    assert _later(node, check).status is Status.WARN


def _later(node: Node, check: Check) -> CheckResult:
    assert isinstance(node.clock, FakeClock)
    node.clock.advance(strikes.APART_S)
    return examine([check], node, HealthConfig()).results[0]


def test_hooks_that_look_in_the_same_moment_see_a_failure_once(tmp_path: Path) -> None:
    """Eight jobs begin together on a node, and each of their prologs sees what is over in a second."""
    node = fake_node(tmp_path)
    check = made("flaps", broken, strikes=2)
    assert [examine([check], node, HealthConfig()).status for _ in range(8)] == [Status.WARN] * 8
    assert _later(node, check).status is Status.FAIL
    # And it stays a failure for who looks a moment later.
    assert examine([check], node, HealthConfig()).status is Status.FAIL


def test_what_was_seen_before_the_disk_was_full_does_not_count_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = fake_node(tmp_path)
    check, well = made("flaps", broken, strikes=2), made("flaps", fine, strikes=2)
    _later(node, check)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(state_module, "replace_file", full)
        assert _later(node, check).status is Status.WARN, "it can't be remembered"
        _later(node, well)
    assert _later(node, check).status is Status.WARN


def test_a_boot_in_between_does_not_hide_a_failure(tmp_path: Path) -> None:
    node = fake_node(tmp_path)
    check = made("flaps", broken, strikes=2)
    _later(node, check)
    assert isinstance(node.clock, FakeClock)
    node.clock.boot = 5.0
    assert examine([check], node, HealthConfig()).status is Status.FAIL


def test_nothing_is_counted_where_nothing_can_be_remembered(tmp_path: Path) -> None:
    node = fake_node(tmp_path, state=StateDir(None))
    check = made("flaps", broken, strikes=2)
    seen = [_later(node, check).status for _ in range(3)]
    assert seen == [Status.WARN] * 3


def test_a_check_that_did_not_run_neither_counts_nor_forgets() -> None:
    result = CheckResult(Status.FAIL, "x", check="a", scope="gpu 1")
    once, twice = Seen(1, 5.0), Seen(2, 5.0)
    judged, counts = count([result], {"a gpu 1": once, "b node": twice, "a gpu 2": once}, {"a": 3}, 100.0)
    assert judged[0].status is Status.WARN
    assert counts == {"a gpu 1": Seen(2, 100.0), "b node": twice}
    skipped = CheckResult(Status.SKIP, "x", check="a")
    assert count([skipped], {"a gpu 1": once}, {"a": 3}, 100.0)[1] == {"a gpu 1": once}


# --- verdict -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([], ExitCode.UNKNOWN),
        ([skip("x")], ExitCode.UNKNOWN),
        ([skip("x"), ok("x")], ExitCode.OK),
        ([ok("x"), warn("x", "s")], ExitCode.WARN),
        ([warn("x", "s"), fail("x", "s", remedy="r"), ok("x")], ExitCode.FAIL),
    ],
)
def test_the_exit_code_is_that_of_the_worst_result(results: list[CheckResult], expected: ExitCode) -> None:
    assert exit_code(results) is expected


def test_a_report_survives_json(node: Node) -> None:
    report = examine([made("broken", broken), made("fine", fine)], node, HealthConfig())
    assert HealthReport.from_json(report.to_json()) == report


# --- calls in processes of their own -----------------------------------------------------------------


def test_calls_are_made_side_by_side_and_one_that_hangs_is_late() -> None:
    began = time.monotonic()

    def sleep() -> int:
        time.sleep(30)
        return 0

    answers = call_isolated({"a": lambda: 1, "b": sleep, "c": lambda: 3}, 4.0, int)
    assert (answers["a"].value, answers["c"].value) == (1, 3)
    assert answers["b"].late
    assert answers["b"].trouble == "no answer within 4 s"
    assert time.monotonic() - began < 25.0


def test_what_a_call_raises_is_told() -> None:
    def refuse() -> int:
        raise PermissionError(13, "Permission denied")

    answer = call_isolated({"a": refuse}, 10.0, int)["a"]
    assert (answer.value, answer.trouble, answer.late) == (None, "Permission denied", False)


# --- what is remembered ------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": "x"}', b"\xff" * 100, b"[" * 100_000])
def test_state_that_cannot_be_understood_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "strikes.json").write_bytes(content)
    assert StateDir(tmp_path).load("strikes", dict[str, int]) is None


def test_a_state_file_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    (tmp_path / "y.json").mkdir()
    StateDir(tmp_path).save("real", 1)
    (tmp_path / "z.json").symlink_to("real.json")
    for name in "xyz":
        assert StateDir(tmp_path).load(name, int) is None
        StateDir(tmp_path).forget(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's directory")
def test_a_directory_where_others_may_exchange_files_is_not_used(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.save("x", 1)
    for owner, mode in ((12345, 0o700), (0, 0o770), (0, 0o777)):
        os.chown(tmp_path / "state", owner, 0)
        (tmp_path / "state").chmod(mode)
        assert state.load("x", int) is None
        with pytest.raises(UnavailableError, match="is not used: "):
            state.save("x", 2)
    (tmp_path / "state").chmod(0o1777)
    state.save("x", 2)
    assert state.load("x", int) == 2


def test_state_is_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "new" / "place")
    state.save("x", {"a": 1})
    state.save("x", {"a": 2})
    assert state.load("x", dict[str, int]) == {"a": 2}
    assert (tmp_path / "new" / "place").stat().st_mode & 0o777 == 0o700
    assert [file.name for file in (tmp_path / "new" / "place").iterdir()] == ["x.json"]
    assert (tmp_path / "new" / "place" / "x.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's file")
def test_root_does_not_believe_what_another_user_has_left(tmp_path: Path) -> None:
    StateDir(tmp_path).save("x", 1)
    os.chown(tmp_path / "x.json", 12345, 0)
    assert StateDir(tmp_path).load("x", int) is None


def test_a_child_that_does_not_end_holds_nothing_of_its_callers() -> None:
    """One in the kernel's D state would keep a pipe open for ever, and whoever reads from it waiting."""
    code = (
        "import os, time\n"
        "from nvrx_slurm.health.isolation import Child\n"
        "child = Child(lambda emit: (emit('is there'), time.sleep(60)), 60)\n"
        "while not child.receive(): pass\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    # Returns only once nobody has the other ends of its pipes.
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=True)
    pid = int(done.stdout)
    left = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    os.kill(pid, signal.SIGKILL)
    assert {name.partition(":")[0] for name in left} == {os.devnull, "pipe"}
