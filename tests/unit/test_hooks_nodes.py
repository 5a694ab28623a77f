"""Which nodes get no jobs, and the way back for those that we have drained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from health_world import CHECKS

from nvrx_slurm.cli.health import main
from nvrx_slurm.health.baseline import Baseline
from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.registry import Check, Need, Settings
from nvrx_slurm.health.result import CheckResult, fail, ok
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.hooks.nodes import as_document, lines, out_of_service, table
from nvrx_slurm.hooks.resume import RefusedError, Resumption, elsewhere
from nvrx_slurm.slurm import SlurmUnavailableError
from nvrx_slurm.slurm.administration import (
    ExcludingJob,
    JobOnNode,
    ScontrolAdmin,
    parse_excluding_jobs,
    parse_node_records,
)
from nvrx_slurm.testing.health import fake_node
from nvrx_slurm.testing.slurm import FakeNodeAdmin
from nvrx_slurm.testing.slurm_commands import FakeSlurmCommands

OURS = "nvrx:fan:node:repair 900 it is off"
# Captured from Slurm 22.05.8; the middle is left out.
NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=16  CPUAlloc=0 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0 \
State=IDLE+DRAIN ThreadsPerCore=1 Partitions=batch,big  BootTime=1796073230 ExtSensorsTemp=n/s \
Reason=nvrx:fan:node:repair 900 it is off, State=IDLE pid=3 [root@1796089411]
NodeName=n2 Arch=x86_64 State=ALLOCATED ThreadsPerCore=1 Partitions=batch  BootTime=1796073230
NodeName=n3 State=DOWN* Partitions=batch Reason=Not responding [slurm@1796080000] Comment=x
"""


def test_nodes_are_read_as_scontrol_prints_them() -> None:
    one, two, three = parse_node_records(NODES)
    assert (one.name, one.state, one.partitions) == ("n1", "idle+drain", ("batch", "big"))
    assert (one.reason, one.set_by, one.since) == (f"{OURS}, State=IDLE pid=3", "root", 1796089411)
    assert (two.state, two.reason, two.set_by, two.since) == ("allocated", "", "", None)
    assert (three.reason, three.set_by) == ("Not responding", "slurm")
    assert [record.out_of_service for record in (one, two, three)] == [True, False, True]


@pytest.mark.parametrize(
    ("state", "out", "drained"),
    [
        ("IDLE+DRAIN", True, True),
        ("ALLOCATED+DRAIN*", True, True),
        ("DOWN+DRAIN+NOT_RESPONDING", True, True),
        ("DOWN*", True, False),
        ("IDLE+FAIL", True, False),
        ("IDLE+CLOUD+POWERED_DOWN", False, False),
        ("IDLE~", False, False),
        ("MIXED+CLOUD+POWERING_UP", False, False),
        ("IDLE+DYNAMIC_NORM+PLANNED", False, False),
    ],
)
def test_a_state_says_whether_jobs_start_on_the_node(state: str, out: bool, drained: bool) -> None:
    (record,) = parse_node_records(f"NodeName=n1 Arch=x86_64 State={state} Partitions=batch\n")
    assert (record.out_of_service, record.drained) == (out, drained)


def test_what_operators_write_on_a_node_is_no_state_and_no_reason() -> None:
    """Since 22.05 there is Extra, since 23.02 jobs ask for what it says."""
    extra = 'Extra={"rack": 7, "State=DOWN": "x"} Comment=Reason: ask ops [on call] State=DOWN'
    reason = f"Reason={OURS} [root@7]"
    for told in (f"{extra} {reason}", f"{reason} {extra}"):
        (record,) = parse_node_records(f"NodeName=n1 State=IDLE+DRAIN Partitions=b {told}\n")
        assert (record.state, record.partitions, record.reason) == ("idle+drain", ("b",), OURS)


def test_jobs_that_exclude_nodes_are_read_as_squeue_prints_them() -> None:
    assert parse_excluding_jobs("5|bob|(null)\n6|al|n[1-2],n7\n7|bob|\n") == [
        ExcludingJob("6", "al", ("n1", "n2", "n7"))
    ]


def test_what_is_asked_of_slurm() -> None:
    commands = FakeSlurmCommands(
        {
            "scontrol -o show nodes": NODES,
            "scontrol -o show job 7": "JobId=7 ArrayJobId=7 ArrayTaskId=3 JobName=x\n",
            "scontrol": "",
            "squeue -h -w n1 -u 1001": "5 RUNNING\n6 COMPLETING\n",
        }
    )
    admin = ScontrolAdmin({}, commands)
    admin.drain("n1", OURS)
    admin.resume("n1")
    admin.start_elsewhere("7")
    assert admin.jobs_of(1001, "n1") == [JobOnNode(5, completing=False), JobOnNode(6, completing=True)]
    assert len(admin.node_records()) == 3
    assert commands.asked[:5] == [
        f"scontrol update NodeName=n1 State=DRAIN Reason={OURS}",
        "scontrol update NodeName=n1 State=RESUME",
        "scontrol -o show job 7",
        "scontrol requeue 7_3",
        "scontrol update JobId=7_3 StartTime=now+10",
    ]


def test_nodes_that_get_no_jobs_are_listed_with_why_who_and_since_when() -> None:
    found = out_of_service(parse_node_records(NODES), [ExcludingJob("6", "al", ("n2",))])
    assert lines(found, now=900 + 7200) == [
        f"n1 idle+drain 2h root {OURS}, State=IDLE pid=3",
        "n3 down* 0s slurm Not responding",
        "n2 excluded al job 6 excludes it",
    ]
    assert table(found).row_count == 3
    document = json.loads(as_document(found))
    assert document["schema"] == "nvrx.nodes.v1"
    assert document["nodes"][0]["ours"] == {
        "check": "fan",
        "scope": "node",
        "action": "repair",
        "since": 900,
        "detail": "it is off, State=IDLE pid=3",
    }
    assert document["nodes"][1]["ours"] is None


def test_where_all_is_well_one_line_says_so() -> None:
    assert lines(out_of_service([], [])) == ["every node is in service"]


# --- resume ------------------------------------------------------------------------------------------------


class World:
    """Node n1, drained for its fan."""

    def __init__(self, root: Path) -> None:
        self.admin = FakeNodeAdmin("n1", "n2")
        self.admin.set("n1", "idle+drain", OURS)
        self.fan: CheckResult = ok("turns")
        self.said: list[str] = []
        self.stages = (Stage.MANUAL,)
        self.strikes = 1
        self._root = root

    def resume(self, name: str = "n1", *, repaired: bool = False) -> None:
        fan = Check(
            name="fan",
            run=lambda node, settings: [self.fan],
            stages=self.stages,
            needs=(Need.PROCFS,),
            settings=Settings,
            budget_s=5.0,
            strikes=self.strikes,
            lane="fan",
            opt_in=False,
        )
        node = fake_node(self._root)
        Resumption(name, self.admin, node, {"fan": fan}, HealthConfig(), self.said.append).run(
            repaired=repaired
        )

    @property
    def baseline(self) -> Baseline | None:
        return fake_node(self._root).baseline


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


OFF = fail("it is off", "/sys/fan", remedy="replace it")


def test_a_node_where_nothing_fails_any_more_is_resumed_with_a_new_baseline(world: World) -> None:
    world.resume()
    assert world.admin.orders == [("resume", "n1")]
    assert world.baseline is not None
    assert world.said[-1] == f"node n1 is back in service; it was drained for {OURS}"


def test_a_node_that_still_fails_stays_drained(world: World) -> None:
    world.fan = OFF
    with pytest.raises(RefusedError, match="stays drained"):
        world.resume()
    assert world.admin.orders == []
    assert world.baseline is None
    assert world.said[0].startswith("FAIL fan: it is off")


def test_a_failure_that_drains_on_repetition_only_keeps_it_drained_at_first_sight(world: World) -> None:
    world.strikes, world.fan = 3, OFF
    with pytest.raises(RefusedError, match="stays drained"):
        world.resume()


def test_the_check_that_has_drained_it_is_run_whatever_its_stages(world: World) -> None:
    world.stages, world.fan = (Stage.EPILOG,), OFF
    with pytest.raises(RefusedError, match="stays drained"):
        world.resume()


def test_after_a_repair_the_baseline_is_taken_first(world: World) -> None:
    world.fan = OFF
    with pytest.raises(RefusedError):
        world.resume(repaired=True)
    assert world.baseline is not None


@pytest.mark.parametrize(
    ("state", "reason", "why"),
    [
        (
            "idle+drain",
            "swapping the fan",
            "drained by alice, not by these checks, for: swapping the fan",
        ),
        ("idle", OURS, "is not drained: it is idle"),
        ("down*", OURS, "is not drained: it is down"),
    ],
)
def test_a_node_that_others_have_taken_out_stays_out(world: World, state: str, reason: str, why: str) -> None:
    world.admin.set("n1", state, reason, set_by="alice")
    with pytest.raises(RefusedError, match=why.replace("*", r"\*")):
        world.resume()
    assert world.admin.orders == []


def test_a_reason_that_somebody_gives_during_the_checks_counts(world: World) -> None:
    def look() -> list[object]:
        records = list(world.admin.records.values())
        world.admin.set("n1", "idle+drain", "wait, I look at it", set_by="alice")
        return records

    world.admin.node_records = look  # type: ignore[assignment]
    with pytest.raises(RefusedError, match="drained by alice"):
        world.resume()


def test_a_node_that_slurm_does_not_know_and_a_slurm_that_does_not_answer(world: World) -> None:
    with pytest.raises(RefusedError, match="Slurm does not know node n9"):
        world.resume("n9")
    world.admin.unavailable = SlurmUnavailableError("no answer")
    with pytest.raises(RefusedError, match="Slurm could not be asked: no answer"):
        world.resume()


def test_on_another_node_the_same_is_run_there(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    via = tmp_path / "via"
    via.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\nexit 3\n')
    via.chmod(0o755)
    assert elsewhere(f"{via} -q", "n2", ["/opt/nvrx-health", "resume", "n2"]) == 3
    assert seen.read_text().splitlines() == ["-q", "n2", "/opt/nvrx-health resume n2"]
    with pytest.raises(RefusedError, match="No such file"):
        elsewhere(str(tmp_path / "nothing"), "n2", ["x"])


@pytest.mark.parametrize(
    ("via", "why"),
    [
        ("sh -c 'exit 255'", "ended with code 255: node n2 was not looked at"),
        ("false", "ended with code 1: node n2 was not looked at"),
        ('ssh "', "--via 'ssh \"': No closing quotation"),
        ("", "--via: a command is needed"),
    ],
)
def test_a_node_that_cannot_be_reached_stays_as_it_is(via: str, why: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(why)):
        elsewhere(via, "n2", ["/opt/nvrx-health", "resume", "n2"])


def test_the_checks_of_this_package_include_all_that_are_looked_at_deeper() -> None:
    assert all(name in CHECKS for name in HealthConfig().hooks.deep_checks)


def test_a_node_whose_host_name_is_another_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, too, the command would hold the node for another one, and ask it again, for ever."""
    nodes = tmp_path / "nodes"
    nodes.write_text(f"NodeName=n2 State=IDLE+DRAIN Partitions=batch Reason={OURS} [root@1]\n")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, body in (("scontrol", f"cat {nodes}"), ("via", f"printf '%s ' \"$@\" > {tmp_path}/seen")):
        (bin_dir / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_dir / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
    monkeypatch.setattr("sys.argv", ["/opt/nvrx/bin/nvrx-health"])
    done = CliRunner().invoke(main, ["resume", "n2", "--via", str(bin_dir / "via")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "seen").read_text() == "n2 /opt/nvrx/bin/nvrx-health resume n2 --here "
