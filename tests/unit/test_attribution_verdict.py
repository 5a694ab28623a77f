"""From logs to a verdict: the first cause, its culprit, and what happens next."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fr_world import World, tensor_and_data_parallel
from healthy_logs import healthy
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.attribution.attribute import as_attempt, attribute, conclude
from nvrx_slurm.attribution.evidence import CycleEvidence, ProcessFault, SchedulerState
from nvrx_slurm.attribution.flight_recorder import Place
from nvrx_slurm.attribution.history import Attempt, append_history, read_history
from nvrx_slurm.attribution.logs.finding import Source, SourceKind
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner, Scan
from nvrx_slurm.attribution.policy import Action
from nvrx_slurm.attribution.verdict import Attribution

RULES = load_rules()
PLACES = {rank: Place(f"n{rank // 4}", rank % 4) for rank in range(16)}

SEGV = "E1129 19:20:05.240000 31370 torch/elastic/api.py:1002] failed (exitcode: -11)"
PEER = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:15254."
SIGTERM = "W1129 19:20:01.371000 31265 torch/elastic/api.py:1028] Sending process 3 closing signal SIGTERM"
CHILD = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
TIMEOUT = (
    "[E ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=15, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)
KILLED = "api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 31307) of binary: /opt/venv/bin/python"
OOM_KILL = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0. Some of the step tasks have been OOM Killed."
)
STORE = "[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=76): Connection reset by peer"
ECC = "CUDA error: uncorrectable ECC error encountered"
PORT = "NCCL WARN NET/IB : Got non-fatal async event: port error(10)"
NAN = "AssertionError: Rank 11: found NaN in local grad norm in backward pass. Device: 3, node: n9"
XID = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
ABORTED = "srun: Job step aborted: Waiting up to 47 seconds for job step to finish."
NODE_FAIL = "srun: error: Node failure on r2"
NOTICE = "slurmstepd-r1: error: *** JOB 14 ON r1 CANCELLED AT 2026-11-29T19:14:54 DUE TO NODE FAILURE ***"
ADVICE = [
    "CUDA kernel errors might be asynchronously reported at some other API call.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
]
STEP = " iteration {}/ 500 | consumed samples: 256 | lm loss: 2.0E+00 |"


def scan(lines: Sequence[str], source: Source | None = None) -> Scan:
    scanner = LogScanner(source or Source(Path("job.log")), RULES)
    scanner.feed("\n".join(lines).encode() + b"\n")
    return scanner.finish()


def judge(
    lines: Sequence[str],
    kind: SourceKind = SourceKind.OUTPUT,
    node: str | None = None,
    history: Sequence[Attempt] = (),
    **facts: object,
) -> Attribution:
    source = Source(Path("job.log"), kind, node=node)
    evidence = CycleEvidence(logs=(source,), places=PLACES, **facts)  # type: ignore[arg-type]
    return conclude(evidence, RULES, [scan(lines, source)], history=history, now=1000.0)


def merged(rank: int, text: str, second: int = 0) -> str:
    return f"2026-11-30T10:00:{second:02d}.000 n{rank // 4} rank {rank}: {text}"


class TestFirstCause:
    @pytest.mark.parametrize(
        ("lines", "category"),
        [
            ([PEER, SIGTERM, SEGV], "host.segfault"),
            ([KILLED, OOM_KILL, STORE], "mem.host_oom"),
            (["RuntimeError: " + ECC, TIMEOUT, CHILD], "gpu.ecc_uncorrectable"),
            ([NAN, TIMEOUT], "num.nan"),
            (
                ["OSError: [Errno 28] No space left on device", "PytorchStreamWriter failed writing file"],
                "storage.no_space",
            ),
            ([NODE_FAIL, ABORTED, NOTICE], "slurm.node_fail"),
            ([PORT, STEP.format(12)], "unknown"),
            (ADVICE, "unknown"),
            ([PEER, STORE, SIGTERM], "unknown"),
            ([TIMEOUT, PEER, SIGTERM, CHILD], "nccl.timeout"),
            ([CHILD], "elastic.child_failed"),
            (["ModuleNotFoundError: No module named 'x'", CHILD], "code.import"),
        ],
    )
    def test_it_is_the_root_wherever_it_stands(self, lines: list[str], category: str) -> None:
        for order in itertools.permutations(lines) if PORT not in lines else [lines]:
            assert judge(order).family.id == category, order

    @settings(max_examples=60, deadline=None)
    @given(
        st.permutations(
            [("root", NAN), *(("cascade", line) for line in [PEER, STORE, SIGTERM, CHILD, TIMEOUT, PEER])]
        )
    )
    def test_no_interleaving_of_root_and_cascade_changes_it(self, lines: list[tuple[str, str]]) -> None:
        result = judge([line for _, line in lines])
        assert result.family.id == "num.nan"

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from([PEER, STORE, SIGTERM, CHILD, NOTICE, *ADVICE, ABORTED]), max_size=12))
    def test_cascades_alone_never_exclude_a_node_and_never_stop(self, lines: list[str]) -> None:
        for kind in (SourceKind.OUTPUT, SourceKind.MERGED, SourceKind.SCHEDULER):
            decision = judge(lines, kind).decision
            assert decision.exclude == ()
            assert decision.action is Action.RESTART

    @settings(max_examples=40, deadline=None)
    @given(st.permutations(range(8)), st.integers(0, 10**6))
    def test_other_ranks_and_numbers_give_the_same_fingerprint(self, ranks: list[int], number: int) -> None:
        def of(order: Sequence[int], sample: int) -> str:
            trace = [
                "Traceback (most recent call last):",
                '  File "/home/u/train.py", line 3, in step',
                "    f()",
            ]
            lines = [merged(r, t) for r in order for t in [*trace, f"ValueError: bad sample {sample}"]]
            return judge(lines, SourceKind.MERGED).fingerprint

        assert of(ranks, number) == of(list(range(8)), 17)

    def test_a_fault_that_training_went_on_after_is_not_it(self) -> None:
        result = judge([STEP.format(1), PORT, STEP.format(2), STEP.format(3), TIMEOUT])
        assert result.family.id == "nccl.timeout"
        assert [finding.family.id for finding in result.choice.recovered] == ["net.ib_port_event"]

    @pytest.mark.parametrize("then", [[], [STEP.format(2)]])
    def test_a_fault_that_was_healed_in_process_is_not_it(self, then: list[str]) -> None:
        healed = "rank 3 restarts as iteration 1, 0.020 s after: Interruption.EXCEPTION affecting ranks {3}"
        trace = [
            "Traceback (most recent call last):",
            '  File "/home/u/train.py", line 3, in step',
            "    f()",
        ]
        fault = [STEP.format(1), *trace, "ValueError: bad sample 17"]
        result = judge([*fault, healed, *then, TIMEOUT])
        assert result.family.id == "nccl.timeout"
        assert [finding.family.id for finding in result.choice.recovered] == ["code.exception"]
        assert judge([*fault, healed, *then, *fault[1:]]).family.id == "code.exception"

    def test_one_more_step_of_another_rank_does_not_hide_it(self) -> None:
        lines = [STEP.format(1), merged(5, "ValueError: bad sample 17"), STEP.format(2), PEER, CHILD]
        assert judge(lines, SourceKind.MERGED).family.id == "code.exception"

    def test_slurms_state_outweighs_every_line(self) -> None:
        result = judge([NAN, TIMEOUT], scheduler=SchedulerState.PREEMPTED)
        assert (result.family.id, result.decision.action) == ("slurm.preempted", Action.WAIT)

    def test_what_the_launcher_saw_explains_the_victims_line(self) -> None:
        fault = ProcessFault(ts=None, rank=9, node="n2", signal="SIGSEGV")
        result = judge([PEER, SIGTERM, CHILD], SourceKind.MERGED, faults=(fault,))
        assert result.family.id == "host.segfault"
        assert [(c.kind, c.id, c.node) for c in result.culprits] == [("rank", "9", "n2")]

    def test_a_kernels_event_long_before_the_fault_concerns_nobody(self) -> None:
        kernel = Source(Path("kern.log"), SourceKind.KERNEL, node="n1")
        events = scan(["[Mon Nov 30 08:00:00 2026] " + XID], kernel)
        log = scan([merged(3, TIMEOUT, 5)], Source(Path("merged.log"), SourceKind.MERGED))
        evidence = CycleEvidence(logs=(kernel,))
        assert conclude(evidence, RULES, [events, log]).family.id == "nccl.timeout"


class TestSummaries:
    def test_torchelastics_summary_names_the_rank_of_an_exit(self) -> None:
        lines = [
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2026-11-29_19:20:05",
            "  host      : n1",
            "  rank      : 5 (local_rank: 1)",
            "  exitcode  : -11 (pid: 31376)",
            "  error_file: <N/A>",
            "  traceback : Signal 11 (SIGSEGV) received by PID 31376",
        ]
        result = judge([PEER, *lines])
        assert result.family.id == "host.segfault"
        assert [(culprit.kind, culprit.id) for culprit in result.culprits] == [("rank", "5")]


class TestTracebacks:
    def test_those_of_mixed_ranks_are_put_together_per_rank(self) -> None:
        ours = [
            "Traceback (most recent call last):",
            '  File "/home/u/train.py", line 3, in forward',
            "    y = f(x)",
        ]
        theirs = [
            "Traceback (most recent call last):",
            '  File "/opt/lib/python3.11/site-packages/torch/x.py", line 9, in wait',
        ]
        rng = random.Random(3)
        queues = [
            [f"[rank{r}]: {t}" for t in ([*ours, "ValueError: odd"] if r == 2 else [*theirs, PEER])]
            for r in range(6)
        ]
        lines = []
        while any(queues):
            lines.append(rng.choice([q for q in queues if q]).pop(0))
        result = judge(lines)
        primary = result.choice.primary
        assert primary is not None
        assert (primary.rank, primary.exception, primary.frame) == (2, "ValueError", "train.py:forward")

    def test_an_exception_without_a_known_name_counts_when_a_traceback_ends_with_it(self) -> None:
        lines = [
            "Traceback (most recent call last):",
            '  File "t.py", line 1, in f',
            "    g()",
            "mylib.Oops: no way",
        ]
        result = judge(lines)
        assert result.family.id == "code.exception"

    def test_source_lines_of_a_traceback_are_no_messages(self) -> None:
        lines = [
            "Traceback (most recent call last):",
            '  File "t.py", line 1, in f',
            '    raise OSError("CUDA out of memory, no space left on device")',
            "KeyError: 'x'",
        ]
        assert judge(lines).family.id == "code.exception"


class TestHealthyLogs:
    def test_ten_thousand_lines_of_several_frameworks_have_no_root(self) -> None:
        lines = healthy(10_000)
        result = judge(lines)
        assert result.choice.primary is None, result.choice.primary
        assert not result.found
        assert result.progress.last_step is not None

    @pytest.mark.parametrize(
        "framework",
        ["megatron", "lightning", "hf", "tqdm", "deepspeed", "torchtitan", "maxtext", "nanogpt", "examples"],
    )
    def test_progress_is_read_from_each_framework(self, framework: str) -> None:
        found = scan(healthy(200, framework)).progress
        assert found.advances > 0
        assert framework in ("hf", "lightning") or found.last_step is not None

    def test_a_save_that_began_is_no_checkpoint(self) -> None:
        found = scan(
            ["saving checkpoint at iteration 500 to /ckpt", "Saving model checkpoint to out/checkpoint-900"]
        )
        assert found.progress.saved_step is None
        found = scan(["  successfully saved checkpoint from iteration     500 to /ckpt"])
        assert found.progress.saved_step == 500

    def test_a_bar_of_something_else_is_no_training(self) -> None:
        assert (
            scan(["Loading checkpoint shards: 50%|##  | 2/4 [00:01<00:01, 1.9it/s]"]).progress.advances == 0
        )


class TestHostileLogs:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.binary(max_size=300), max_size=40))
    def test_random_bytes_never_break_the_scan(self, pieces: list[bytes]) -> None:
        scanner = LogScanner(Source(Path("x")), RULES)
        for piece in pieces:
            scanner.feed(piece)
        assert scanner.finish().bytes_read == sum(map(len, pieces))

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 400))
    def test_the_pieces_in_which_a_log_arrives_do_not_matter(self, size: int) -> None:
        text = "\n".join(
            [STEP.format(1), NAN, TIMEOUT, PEER, "\r".join(STEP.format(n) for n in (2, 3)), CHILD]
        ).encode()
        whole, parts = LogScanner(Source(Path("x")), RULES), LogScanner(Source(Path("x")), RULES)
        whole.feed(text)
        for at in range(0, len(text), size):
            parts.feed(text[at : at + size])
        one, other = whole.finish(), parts.finish()
        assert [(f.family.id, f.line, f.count) for f in one.findings] == [
            (f.family.id, f.line, f.count) for f in other.findings
        ]

    def test_one_line_of_ten_megabytes_is_kept_short(self) -> None:
        scanner = LogScanner(Source(Path("x")), RULES)
        for _ in range(160):
            scanner.feed(b"nccl error xid (((( " * 3277)
            assert len(scanner._carry) <= 1 << 17
        scanner.feed(b"\nValueError: odd\n")
        found = scanner.finish()
        assert "code.exception" in [finding.family.id for finding in found.findings]
        assert found.lines == 2

    def test_kinds_of_messages_beyond_a_bound_are_dropped_and_counted(self) -> None:
        words = ["".join(chr(97 + (n // 26**i) % 26) for i in range(4)) for n in range(2100)]
        found = scan([f"{word}{word}Error: {word}" for word in words])
        assert (len(found.findings), found.dropped) == (2000, 100)

    @pytest.mark.parametrize(
        "line", [XID, NODE_FAIL, "salloc: error: Prolog failure on node k3", NAN, NOTICE]
    )
    def test_text_that_a_user_can_print_excludes_no_node(self, line: str) -> None:
        for kind in (SourceKind.OUTPUT, SourceKind.MERGED, SourceKind.RANK):
            result = judge([line], kind)
            assert result.decision.exclude == ()

    def test_a_printed_xid_is_unverified_and_yields_to_a_real_exception(self) -> None:
        alone = judge([XID])
        assert (alone.family.id, alone.decision.action) == ("gpu.off_bus", Action.RESTART)
        assert alone.confidence <= 0.3
        assert judge([XID, "ValueError: bad sample 17"]).family.id == "code.exception"


class TestCulprits:
    def test_the_kernel_of_a_node_proves_against_it(self) -> None:
        result = judge([XID], SourceKind.KERNEL, node="n3")
        assert result.decision.exclude == ("n3",)
        assert result.decision.action is Action.RESTART_EXCLUDE
        assert not result.decision.counted

    def test_a_gpus_error_in_a_ranks_own_log_excludes_the_node_that_the_launcher_knows(self) -> None:
        result = judge(
            [merged(6, "RuntimeError: " + ECC), merged(1, TIMEOUT), merged(0, CHILD)], SourceKind.MERGED
        )
        assert (result.family.id, result.decision.exclude) == ("gpu.ecc_uncorrectable", ("n1",))

    def test_slurm_names_the_lost_node_and_the_survivors_notice_names_nobody(self) -> None:
        result = judge([NODE_FAIL, ABORTED, NOTICE], SourceKind.SCHEDULER)
        assert result.decision.exclude == ("r2",)
        assert judge([NOTICE], SourceKind.SCHEDULER).decision.exclude == ()

    def test_a_suspect_is_excluded_when_it_is_one_again(self) -> None:
        fault = ProcessFault(ts=None, rank=9, node="n2", signal="SIGSEGV")
        first = judge([PEER], faults=(fault,), last_step=10)
        assert first.decision.exclude == ()
        again = judge([PEER], faults=(fault,), last_step=20, history=[as_attempt(first)])
        assert again.decision.exclude == ("n2",)

    def test_a_hang_is_the_rank_that_the_flight_recorder_names(self, tmp_path: Path) -> None:
        World(tensor_and_data_parallel(16, 4, 8), {7: 13}).write(tmp_path / "dumps")
        (tmp_path / "job.log").write_text(TIMEOUT + "\n" + CHILD + "\n")
        evidence = CycleEvidence(
            logs=(Source(tmp_path / "job.log"),), dumps=tmp_path / "dumps", places=PLACES, world_size=16
        )
        first = attribute(evidence, RULES)
        assert first.family.id == "nccl.timeout"
        assert [(c.rank, c.node) for c in first.culprits] == [(7, "n1")]
        assert first.decision.exclude == ()
        again = attribute(evidence, RULES, history=[as_attempt(first)])
        assert again.decision.exclude == ("n1",)


class TestDecisions:
    def test_what_cannot_heal_stops_at_once_unless_training_had_begun(self) -> None:
        lines = ["ModuleNotFoundError: No module named 'x'"]
        assert judge(lines).decision.rule == "4-deterministic"
        assert judge([STEP.format(5), *lines]).decision.action is Action.RESTART

    def test_a_full_disk_holds(self) -> None:
        assert judge(["OSError: [Errno 28] No space left on device"]).decision.action is Action.HOLD

    def test_the_same_exception_without_progress_stops_the_second_time_and_with_progress_does_not(
        self,
    ) -> None:
        lines = ["ValueError: bad sample 17"]
        first = judge(lines, last_step=100)
        assert first.decision.action is Action.RESTART
        history = [as_attempt(first)]
        assert judge(lines, last_step=100, history=history).decision.rule == "7-repeated"
        assert judge(lines, last_step=150, history=history).decision.action is Action.RESTART

    def test_progress_that_nobody_can_tell_is_never_held_against_a_job(self) -> None:
        history: list[Attempt] = []
        for _ in range(4):
            result = judge(["ValueError: bad sample 17"], history=history)
            assert result.decision.action is Action.RESTART
            history.append(as_attempt(result))

    def test_an_exception_before_the_first_step_stops_the_second_time(self) -> None:
        first = judge(["ValueError: bad config"], seconds=8.0)
        assert first.progress.trained is False
        again = judge(["ValueError: bad config"], seconds=8.0, history=[as_attempt(first)])
        assert again.decision.action is Action.STOP

    def test_three_attempts_without_a_newer_checkpoint_stop(self) -> None:
        history = [
            as_attempt(judge([line], saved_step=50, last_step=step))
            for line, step in [(NAN, 60), (TIMEOUT, 70)]
        ]
        result = judge(["ValueError: x"], saved_step=50, last_step=80, history=history)
        assert result.decision.rule == "8-no-checkpoint"

    def test_infrastructure_does_not_use_up_the_users_budget(self) -> None:
        history = [
            Attempt(category="gpu.off_bus", fingerprint=str(n), action="restart_exclude", counted=False)
            for n in range(9)
        ]
        assert (
            judge([XID], SourceKind.KERNEL, node="n3", history=history).decision.action
            is Action.RESTART_EXCLUDE
        )
        history.append(history[0])
        assert judge([XID], SourceKind.KERNEL, node="n3", history=history).decision.action is Action.STOP

    def test_the_budget_ends_and_four_restarts_an_hour_wait(self) -> None:
        spent = [Attempt(ts=-9e9, category="x", fingerprint=str(n)) for n in range(10)]
        assert judge([TIMEOUT], history=spent).decision.rule == "9-budget"
        quick = [Attempt(ts=900.0, category="x", fingerprint=str(n)) for n in range(4)]
        decision = judge([TIMEOUT], history=quick).decision
        assert (decision.rule, decision.delay_s) == ("9-back-off", 900.0)

    def test_the_time_limit_restarts_where_a_checkpoint_was_saved(self) -> None:
        saved = judge([PEER], scheduler=SchedulerState.TIMEOUT, saved_step=50)
        assert (saved.decision.rule, saved.decision.action, saved.decision.counted) == (
            "3-time-limit",
            Action.RESTART,
            False,
        )
        assert judge([PEER], scheduler=SchedulerState.TIMEOUT).decision.action is Action.STOP

    def test_a_step_that_its_own_launcher_cancelled_does_not_stop_the_job(self) -> None:
        cancelled = "slurmstepd: error: *** STEP 12.0 ON n3 CANCELLED AT 2026-01-02T03:04:05 ***"
        assert judge([TIMEOUT, cancelled]).family.id == "nccl.timeout"
        assert judge([cancelled]).decision.action is Action.RESTART


class TestHistory:
    def test_it_survives_in_the_run_directory_and_a_torn_line_is_skipped(self, tmp_path: Path) -> None:
        append_history(tmp_path, Attempt(category="a"))
        with (tmp_path / "attribution.jsonl").open("ab") as file:
            file.write(b'{"category": "to')
        append_history(tmp_path, Attempt(category="b", attempt=1))
        assert [attempt.category for attempt in read_history(tmp_path)] == ["a", "b"]
        assert (tmp_path / "attribution.jsonl").stat().st_mode & 0o777 == 0o600

    def test_there_is_none_at_first(self, tmp_path: Path) -> None:
        assert read_history(tmp_path) == []


def test_a_log_that_cannot_be_read_is_named_and_lowers_the_confidence(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("ValueError: odd\n")
    sources = (Source(tmp_path / "a.log"), Source(tmp_path / "none.log"))
    result = attribute(CycleEvidence(logs=sources), RULES)
    alone = attribute(CycleEvidence(logs=sources[:1]), RULES)
    assert any("none.log" in missing for missing in result.coverage.missing)
    assert result.confidence < alone.confidence


def test_the_document_holds_what_the_schema_names() -> None:
    found = judge([merged(6, "RuntimeError: " + ECC), merged(1, TIMEOUT)], SourceKind.MERGED).document()
    assert json.dumps(found)
    assert found["schema"] == "attribution.v1"
    assert (found["primary"]["category"], found["primary"]["line_no"], found["primary"]["rank"]) == (
        "gpu.ecc_uncorrectable",
        1,
        6,
    )
    assert found["secondary"][0]["relation"] == "cascade_of"
    assert found["decision"]["action"] == "restart_exclude"
    assert len(found["explanation"]) <= 600
