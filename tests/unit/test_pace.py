"""Times of all ranks as they travel from the ranks to the Coordinator, and what is made of them."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.fault_tolerance.pace_channel import PaceChannel, SectionPeriod
from nvrx_slurm.pace import GPU_KERNELS, Kernel, KernelTime, Watch
from nvrx_slurm.pace.exchange import (
    MOST_KERNELS,
    MOST_SECTIONS,
    KernelSum,
    Name,
    Period,
    Scores,
    SectionTime,
    is_name,
    is_period,
    printable,
    renumbered,
)
from nvrx_slurm.pace.job import AllRanks, JobPace, RankPeriod
from nvrx_slurm.pace.measured import score
from nvrx_slurm.pace.names import MOST_NAMES, HeardNames, ToldNames
from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.page import PAGE_VARIABLE
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE, decode_request

STEP, GEMM, NCCL = Name("step"), Name("step", "gemm"), Name("step", "ncclDevKernel_AllReduce")
NAMES = [STEP, GEMM, NCCL]


def period(step_ms: float, gemm_us: float = 100.0, launches: int = 10, **more: str) -> Period:
    return Period(
        10,
        [SectionTime(0, step_ms, 20, 1.0)],
        [KernelSum(1, gemm_us, gemm_us * launches), KernelSum(2, 9e9, 9e9)],
        **more,  # type: ignore[arg-type]
    )


def ranks(steps: Mapping[int, Period]) -> dict[int, RankPeriod]:
    return {
        rank: RankPeriod(f"n{rank // 2}", NAMES, each, (f"rank {rank} is warm",))
        for rank, each in steps.items()
    }


# --- judging ---------------------------------------------------------------------------------------------


def test_a_verdict_names_gpu_kernels_lost_time_and_the_hardware_then() -> None:
    pace = JobPace()
    slow = period(15.0, gemm_us=150.0, gpu="GPU-7")
    for _ in range(2):
        outcome = pace.judge(ranks({rank: slow if rank == 3 else period(10.0) for rank in range(6)}))
    found = {verdict.section: verdict for verdict in outcome.judgement.verdicts}
    assert set(found) == {"step", GPU_KERNELS}
    step = found["step"]
    assert (step.rank, step.node, step.gpu, step.reports) == (3, "n1", "GPU-7", 2)
    assert step.lost_ms == pytest.approx(2 * 5.0), "two passages an iteration"
    assert step.context == ["rank 3 is warm"]
    (kernel,) = step.kernels
    assert (kernel.kernel, kernel.lost_ms) == ("gemm", pytest.approx(0.05)), "ten launches, ten iterations"
    assert found[GPU_KERNELS].lost_ms == pytest.approx(0.05)
    assert found[GPU_KERNELS].score == pytest.approx(1 / 1.5)
    assert outcome.judgement.scores[3].score == pytest.approx(1 / 1.5)


def test_scores_for_scripts_are_those_of_the_package_that_has_them() -> None:
    scores = JobPace().judge(ranks({rank: period(10.0 * (rank + 1), 5.0 * (rank + 1)) for rank in range(4)}))
    expected = [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert scores.scores.relative == [pytest.approx(expected)]
    assert scores.scores.gpu_relative == pytest.approx(expected), "kernels that wait for others do not count"
    assert scores.scores.individual == [[1.0] * 4]
    assert all(map(math.isnan, scores.scores.gpu_individual)), "nobody said"


def test_a_rank_without_the_section_leaves_nobody_compared_and_breaks_nothing() -> None:
    told = ranks({rank: period(10.0) for rank in range(3)})
    told[3] = RankPeriod("n9", NAMES, Period(0, [], []))
    outcome = JobPace().judge(told)
    assert all(map(math.isnan, outcome.scores.relative[0]))
    assert set(outcome.judgement.scores) == {0, 1, 2}


@pytest.mark.parametrize(
    ("reference", "own", "expected"),
    [
        *((1.0, 2.0, 0.5), (2.0, 1.0, 1.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0)),
        *((math.nan, 1.0, math.nan), (math.nan, 0.0, math.nan), (1.0, math.nan, math.nan)),
    ],
)
def test_a_score_is_the_reference_over_the_own_time(reference: float, own: float, expected: float) -> None:
    assert score(reference, own) == pytest.approx(expected, nan_ok=True)


def test_an_empty_period_of_all_is_no_fault() -> None:
    outcome = JobPace().judge({rank: RankPeriod("n0", [], Period(0, [], [])) for rank in range(4)})
    assert (outcome.judgement.verdicts, outcome.judgement.scores, outcome.scores.sections) == ([], {}, [])


def test_a_dead_ranks_report_counts_once_and_the_others_go_on_without_it() -> None:
    pace = JobPace()
    pace.judge(ranks({rank: period(20.0 if rank == 3 else 10.0) for rank in range(6)}))
    for _ in range(2):
        outcome = pace.judge(ranks({rank: period(10.0) for rank in range(6) if rank != 3}))
        assert outcome.judgement.verdicts == []
        assert len(outcome.scores.ranks) == 5


def test_a_changing_world_size_begins_nothing_anew_for_those_who_stay() -> None:
    pace = JobPace()
    pace.judge(ranks({rank: period(20.0 if rank == 1 else 10.0) for rank in range(8)}))
    outcome = pace.judge(ranks({rank: period(20.0 if rank == 1 else 10.0) for rank in range(4)}))
    assert [(verdict.rank, verdict.reports) for verdict in outcome.judgement.verdicts] == [(1, 2)]


def test_another_node_with_the_rank_begins_anew() -> None:
    watch = Watch()

    def measured(node: str) -> AllRanks:
        times = {rank: 20.0 if rank == 1 else 10.0 for rank in range(4)}
        nodes = {rank: node if rank == 1 else "n0" for rank in times}
        return AllRanks({"step": times}, nodes)

    assert watch.add(measured("n1")) == []
    assert watch.add(measured("n2")) == [], "the spare has not been slow before"
    assert [verdict.node for verdict in watch.add(measured("n2"))] == ["n2"]


def test_what_is_a_hundredth_of_the_step_slows_nobody_down() -> None:
    watch = Watch()
    for _ in range(3):
        of_ranks = {rank: 0.3 if rank == 2 else 0.1 for rank in range(6)}
        steps = dict.fromkeys(range(6), 50.0)
        verdicts = watch.add(AllRanks({"log": of_ranks, "step": steps}, dict.fromkeys(range(6), "n0")))
        assert verdicts == []


def test_when_all_become_slower_that_is_told_of_all_and_of_nobody() -> None:
    watch = Watch()
    told = []
    for step_ms in (10.0, 11.0, 10.5, 10.0, 25.0, 25.0, 10.0):
        times = {rank: step_ms + rank / 100 for rank in range(6)}
        judgement = watch.judge(AllRanks({"step": times}, dict.fromkeys(times, "n0")))
        assert judgement.verdicts == []
        told.append([(each.section, each.ranks, each.reports) for each in judgement.slow_downs])
    assert told == [[], [], [], [], [], [("step", 6, 2)], []]


def test_one_lucky_report_makes_no_slow_down_of_the_rest() -> None:
    watch = Watch()
    for step_ms in (10.0, 10.0, 10.0, 5.0, 10.0, 10.0, 10.0, 10.0):
        judgement = watch.judge(
            AllRanks({"step": dict.fromkeys(range(4), step_ms)}, dict.fromkeys(range(4), "n"))
        )
    assert judgement.slow_downs == []


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.just(0.0)),
        max_size=10,
    )
)
def test_no_time_whatever_breaks_a_watch(times: dict[int, float]) -> None:
    watch = Watch()
    for _ in range(3):
        judgement = watch.judge(AllRanks({"step": times}, dict.fromkeys(times, "n0")))
    assert all(0 <= each.score <= 1 for each in judgement.scores.values())
    assert all(verdict.lost_ms > 0 for verdict in judgement.verdicts)


# --- travelling ------------------------------------------------------------------------------------------


def test_names_are_told_once_and_a_receiver_that_missed_some_takes_no_more() -> None:
    told, heard = ToldNames(), HeardNames()
    assert [told.number(name) for name in (STEP, GEMM, STEP)] == [0, 1, 0]
    first, names = told.untold
    assert heard.take(first, names)
    told.told(len(names))
    told.number(NCCL)
    assert told.untold == (2, [NCCL])
    assert not HeardNames().take(*told.untold), "what came before is missing"
    assert heard.take(*told.untold)
    assert list(heard.names) == [STEP, GEMM, NCCL]


def test_a_new_process_numbers_its_names_anew_and_old_lists_stay_as_they_were() -> None:
    heard = HeardNames()
    heard.take(0, [STEP, GEMM])
    old = heard.names
    heard.take(0, [GEMM])
    assert (list(old), list(heard.names)) == ([STEP, GEMM], [GEMM])


def test_ever_new_names_fill_no_memory() -> None:
    told = ToldNames()
    numbers = [told.number(Name("", str(number))) for number in range(MOST_NAMES + 5)]
    assert numbers[-6:] == [MOST_NAMES - 1, None, None, None, None, None]
    assert not HeardNames().take(0, [STEP] * (MOST_NAMES + 1))


def test_numbers_that_nobody_knows_are_left_out() -> None:
    found = renumbered(period(1.0), [7, -1])
    assert ([time.number for time in found.sections], found.kernels) == ([7], [])


@pytest.mark.parametrize(
    "bad",
    [
        Period(0, [SectionTime(0, math.nan, 1, None)], []),
        Period(0, [SectionTime(0, -1.0, 1, None)], []),
        Period(0, [SectionTime(0, 1.0, 0, None)], []),
        Period(0, [SectionTime(-1, 1.0, 1, None)], []),
        Period(0, [SectionTime(0, 1.0, 1, 1.5)], []),
        Period(0, [], [KernelSum(0, math.inf, 1.0)]),
        Period(0, [SectionTime(0, 1e300, 1, None)], []),
        Period(-1, [], []),
        Period(0, [], [], gpu="a\nb"),
        Period(0, [SectionTime(0, 1.0, 1, None)] * (MOST_SECTIONS + 1), []),
        Period(0, [], [KernelSum(0, 1.0, 1.0)] * (MOST_KERNELS + 1)),
    ],
)
def test_what_can_be_no_period_is_refused(bad: Period) -> None:
    assert not is_period(bad)
    assert is_period(period(1.0))


@given(st.text())
def test_every_name_can_be_made_one_that_is_accepted(text: str) -> None:
    assert is_name(Name(printable(text) or "?"))


# --- a rank's side ---------------------------------------------------------------------------------------


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[PaceChannel, socket.socket]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "ranks.sock"))
        listener.listen()
        # RANK is what a restart within the process has made of it.
        channel = PaceChannel.open(
            {
                PAGE_VARIABLE: str(tmp_path / "cycle3-rank5.page"),
                SOCKET_VARIABLE: str(tmp_path / "ranks.sock"),
                "RANK": "0",
            }
        )
        assert channel is not None
        agent, _ = listener.accept()
        with agent:
            yield channel, agent
        channel.close()


def received(agent: socket.socket) -> list[rank_channel.RankRequest]:
    agent.setblocking(False)
    found = []
    try:
        while data := agent.recv(rank_channel.MAX_REQUEST_BYTES):
            found.append(decode_request.decode(data))
    except BlockingIOError:
        pass
    return found


def test_a_rank_tells_names_once_and_then_numbers(rank: tuple[PaceChannel, socket.socket]) -> None:
    channel, agent = rank
    sections = {"step": SectionPeriod(10.0, 20, 0.9)}
    kernels = {Kernel("k" * 500, "step"): KernelTime(1.0, 5.0)}
    assert channel.tell(sections, kernels, iterations=20)
    names, first = received(agent)
    assert isinstance(names, rank_channel.PaceNames)
    assert isinstance(first, rank_channel.PacePeriod)
    assert (names.rank, names.cycle, len(names.names[1].kernel)) == (5, 3, 200)
    assert first.period.sections == [SectionTime(0, 10.0, 20, 0.9)]
    assert channel.tell(sections, kernels)
    (again,) = received(agent)
    assert isinstance(again, rank_channel.PacePeriod)
    assert all(map(rank_channel.is_acceptable, (names, first, again)))


def test_of_many_kernels_the_heaviest_travel_and_a_datagram_holds_them(
    rank: tuple[PaceChannel, socket.socket],
) -> None:
    channel, agent = rank
    kernels = {
        Kernel("\u00e9" * 190 + str(number), "step"): KernelTime(1.0, float(number)) for number in range(500)
    }
    assert channel.tell({}, kernels)
    *names, last = received(agent)
    assert sum(len(each.names) for each in names if isinstance(each, rank_channel.PaceNames)) == MOST_KERNELS
    assert isinstance(last, rank_channel.PacePeriod)
    assert last.period.kernels[0].total_us == 499.0


def test_datagrams_hold_the_longest_names_there_are(rank: tuple[PaceChannel, socket.socket]) -> None:
    channel, agent = rank
    widest = "\U00020000" * 190
    kernels = {Kernel(f"{widest}{n}", f"{widest}{n}"): KernelTime(1.0, float(n)) for n in range(64)}
    assert channel.tell({f"{widest}{n}": SectionPeriod(1.0, 1) for n in range(64)}, kernels)
    *names, _ = received(agent)
    assert sum(len(each.names) for each in names if isinstance(each, rank_channel.PaceNames)) == 128


def test_names_that_begin_alike_are_told_apart_and_a_kernel_without_one_is_left_out(
    rank: tuple[PaceChannel, socket.socket],
) -> None:
    channel, agent = rank
    kernels = {Kernel("k" * 300 + end, "step"): KernelTime(1.0, 5.0) for end in "ab"}
    assert channel.tell(
        {"line\n": SectionPeriod(1.0, 1), "line\t": SectionPeriod(1.0, 1)},
        {**kernels, Kernel("", "step"): KernelTime(1.0, 9.0)},
    )
    names, period = received(agent)
    assert all(map(rank_channel.is_acceptable, (names, period)))
    assert isinstance(names, rank_channel.PaceNames)
    assert len(set(names.names)) == 4
    assert printable("step") == "step"
    assert printable("\ud800\x1b[31m").startswith("??[31m~")


def test_an_agent_that_is_behind_or_gone_holds_up_nobody(rank: tuple[PaceChannel, socket.socket]) -> None:
    channel, agent = rank
    sections = {f"section{number}": SectionPeriod(10.0, 20) for number in range(64)}
    told = 0
    while told < 10_000 and channel.tell(sections, {}):
        told += 1
    assert 0 < told < 10_000, "nobody has read"
    received(agent)
    assert channel.tell(sections, {}), "it goes on when somebody reads"
    agent.close()
    assert not channel.tell(sections, {})
    assert not channel.tell(sections, {})


def test_scores_are_read_once_each(rank: tuple[PaceChannel, socket.socket], tmp_path: Path) -> None:
    channel, _ = rank
    assert channel.scores() is None
    for report in (1, 2):
        scores = Scores(report, [0], ["n0"], ["step"], [[1.0]], [[math.nan]], [[10.0]], [1.0], [1.0])
        draft = tmp_path / "draft"
        draft.write_bytes(msgspec.msgpack.encode(scores))
        os.replace(draft, tmp_path / "cycle3-rank5.pace")
        found = channel.scores()
        assert found is not None
        assert (found.report, found.relative) == (report, [[1.0]])
        assert channel.scores() is None
    (tmp_path / "cycle3-rank5.pace").write_bytes(b"\xff")
    assert channel.scores() is None, "what can't be read is none"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {PAGE_VARIABLE: "/x/cycle0-rank0.page"},
        {PAGE_VARIABLE: "/x/other", SOCKET_VARIABLE: "/x/ranks.sock"},
        {PAGE_VARIABLE: "/x/cycle0-rank0.page", SOCKET_VARIABLE: "/nonexistent/ranks.sock"},
    ],
)
def test_without_an_agent_there_is_no_channel(environ: dict[str, str]) -> None:
    assert PaceChannel.open(environ) is None


def test_the_verdict_has_one_form_on_the_wire_and_in_the_journal() -> None:
    from nvrx_slurm.coordinator.slow_ranks import straggler_event
    from nvrx_slurm.pace import StragglerVerdict

    verdict = StragglerVerdict(
        rank=1, node="", section="step", score=0.512345, lost_ms=3.0004, reports=2, of_reports=3
    )
    event = straggler_event(verdict, "n1", told_by=None)
    assert isinstance(event, StragglerVerdict)
    line = json.loads(msgspec.json.encode(event))
    assert line == {
        "event": "straggler_report",
        "rank": 1,
        "node": "n1",
        "section": "step",
        "score": 0.5123,
        "lost_ms": 3.0,
        "reports": 2,
        "of_reports": 3,
    }
