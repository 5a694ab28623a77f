"""Rules T1 to T12: the order of all time-outs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from nvrx_slurm.doctor.findings import Finding, Status
from nvrx_slurm.doctor.timeouts import JobTimes, OwnTimes, ladders
from nvrx_slurm.slurm import SiteConfig

OK, WARN, PROBLEM, UNKNOWN = Status.OK, Status.WARN, Status.PROBLEM, Status.UNKNOWN
OWN = OwnTimes(keep_alive_s=4.5, cut_off_s=8.5, stop_margin_s=15)
JOB = JobTimes(
    heartbeat_s=2700,
    initial_heartbeat_s=3600,
    workers_stop_s=15,
    process_group_s=600,
    longest_step_s=60,
    hard_s=900,
    time_limit_s=86400,
    signal_s=120,
)
SITE = SiteConfig({"SlurmdTimeout": "120 sec", "KillWait": "30 sec", "UnkillableStepTimeout": "180 sec"})


def findings(job: JobTimes = JOB, own: OwnTimes = OWN, site: SiteConfig | None = SITE) -> dict[str, Finding]:
    found = [finding for ladder in ladders(job, own, site) for finding in ladder.findings()]
    assert len({finding.rule for finding in found}) == len(found)
    return {finding.rule: finding for finding in found}


def test_a_job_in_order_has_nothing_broken() -> None:
    found = findings()
    assert {finding.status for finding in found.values()} == {OK}
    assert list(found) == [f"T{n}" for n in range(1, 13)]


@pytest.mark.parametrize(
    ("rule", "values", "status"),
    [
        ("T1", {"longest_step_s": 600.0}, PROBLEM),
        ("T1", {"longest_step_s": None}, UNKNOWN),
        ("T2", {"process_group_s": 900.0}, WARN),
        ("T2", {"hard_s": None, "heartbeat_s": 600.0}, WARN),
        ("T2", {"hard_s": None, "heartbeat_s": None}, UNKNOWN),
        ("T3", {"hard_s": 2700.0}, WARN),
        ("T4", {"heartbeat_s": 3600.0}, OK),
        ("T4", {"heartbeat_s": 3601.0}, WARN),
        ("T4", {"heartbeat_s": math.inf, "initial_heartbeat_s": math.inf}, WARN),
        ("T5", {"time_limit_s": 3600.0}, WARN),
        ("T5", {"time_limit_s": math.inf}, OK),
        ("T5", {"time_limit_s": math.inf, "initial_heartbeat_s": math.inf}, WARN),
        ("T9", {"workers_stop_s": 30.0}, WARN),
        ("T11", {"signal_s": 15.0}, WARN),
        ("T12", {"signal_s": 86400.0}, PROBLEM),
    ],
)
def test_each_order_of_a_job_is_judged(rule: str, values: dict[str, float | None], status: Status) -> None:
    found = findings(dataclasses.replace(JOB, **values))[rule]
    assert found.status is status, found
    if status in (WARN, PROBLEM):
        assert found.answer.why
        assert found.answer.fix


@pytest.mark.parametrize(
    ("rule", "name", "value", "status"),
    [
        ("T7", "SlurmdTimeout", "8 sec", WARN),
        ("T7", "SlurmdTimeout", "0 sec", OK),  # never; rule S9 has more to say
        ("T9", "KillWait", "15 sec", WARN),
        ("T10", "UnkillableStepTimeout", "30 sec", PROBLEM),
        ("T10", "UnkillableStepTimeout", "", UNKNOWN),
    ],
)
def test_each_order_of_a_site_is_judged(rule: str, name: str, value: str, status: Status) -> None:
    assert findings(site=SiteConfig({**SITE.values, name: value}))[rule].status is status


def test_our_own_orders_are_judged_too() -> None:
    assert findings(own=dataclasses.replace(OWN, keep_alive_s=9))["T6"].status is WARN
    assert findings(own=dataclasses.replace(OWN, stop_margin_s=0))["T8"].status is PROBLEM


def test_a_site_that_could_not_be_asked_leaves_its_orders_open() -> None:
    found = findings(site=None)
    assert {rule for rule, finding in found.items() if finding.status is UNKNOWN} == {"T7", "T9", "T10"}


def test_what_a_job_does_not_use_is_not_in_the_table() -> None:
    found = findings(dataclasses.replace(JOB, hard_s=None, time_limit_s=None, signal_s=None))
    assert not {"T3", "T5", "T11", "T12"} & set(found)


def test_torch_s_default_stands_in_for_the_process_group() -> None:
    hang = ladders(dataclasses.replace(JOB, process_group_s=None), OWN, SITE)[0]
    assert (hang.rungs[1].seconds, hang.rungs[1].origin) == (600, "torch's default, NCCL")
