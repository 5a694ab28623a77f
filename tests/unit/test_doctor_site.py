"""Rules S1 to S19: what the doctor says about a site's Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.doctor.findings import Finding, Status
from nvrx_slurm.doctor.site import CONFIG, SITE, Site, read_site
from nvrx_slurm.slurm import ScontrolDiagnosis, SiteConfig, SlurmRelease, SlurmUnavailableError
from nvrx_slurm.slurm.diagnosis import parse_site_config
from nvrx_slurm.testing.slurm_commands import FakeSlurmCommands

DATA = Path(__file__).parent / "data" / "doctor"
UP = "Slurmctld(primary) at ctl is UP\n"
OK, WARN, PROBLEM, UNKNOWN = Status.OK, Status.WARN, Status.PROBLEM, Status.UNKNOWN
CAPTURED = parse_site_config((DATA / "22.05" / "config.txt").read_text())
RECOMMENDED = parse_site_config((DATA / "25.11" / "config.txt").read_text())


def of_rule(rule: str, config: SiteConfig) -> Finding:
    (found,) = [finding for finding in CONFIG.apply(config) if finding.rule == rule]
    return found


def changed(config: SiteConfig, **values: str | None) -> SiteConfig:
    """Return ``config`` with other values; None takes the key away."""
    merged = {**config.values, **values}
    return SiteConfig({name: value for name, value in merged.items() if value is not None})


def test_what_a_real_site_shows_is_read() -> None:
    assert CAPTURED.release == SlurmRelease(22, 5)
    assert CAPTURED.number("SlurmdTimeout") == 20
    assert CAPTURED.text("Prolog") == ""
    assert CAPTURED.text("MaxBatchRequeue") is None
    assert CAPTURED.flags("SchedulerParameters") == (
        "sched_interval=1",
        "bf_interval=1",
        "batch_sched_delay=0",
    )
    assert CAPTURED.flag_value("SchedulerParameters", "bf_interval") == "1"


def test_other_text_is_no_configuration() -> None:
    with pytest.raises(SlurmUnavailableError):
        parse_site_config("slurm_load_ctl_conf error: Unable to contact slurm controller\n")


def test_the_recommended_site_is_all_right() -> None:
    assert [f for f in CONFIG.apply(RECOMMENDED) if f.status is not OK] == []


def test_a_dev_cluster_degrades_in_two_ways() -> None:
    assert [f.rule for f in CONFIG.apply(CAPTURED) if f.status is not OK] == ["S8", "S10"]


_PROLOG = {"Prolog": "/opt/prolog"}


@pytest.mark.parametrize(
    ("rule", "values", "status"),
    [
        ("S2", {"SLURM_VERSION": "21.08.5"}, WARN),
        ("S2", {"SLURM_VERSION": "25.11.8"}, OK),
        ("S2", {"SLURM_VERSION": None}, UNKNOWN),
        ("S4", {"JobRequeue": "1"}, OK),
        ("S4", {"JobRequeue": "0"}, WARN),
        ("S4", {"JobRequeue": None}, UNKNOWN),
        ("S5", {"KillOnBadExit": "1"}, OK),
        ("S5", {"KillOnBadExit": None}, UNKNOWN),
        ("S6", {"WaitTime": "30 sec"}, OK),
        ("S6", {"WaitTime": None}, UNKNOWN),
        ("S7", {"MpiDefault": "pmix"}, OK),
        ("S7", {"MpiDefault": None}, UNKNOWN),
        ("S8", {"ProctrackType": "proctrack/cgroup"}, OK),
        ("S8", {"ProctrackType": "proctrack/pgid"}, WARN),
        ("S8", {"ProctrackType": None}, UNKNOWN),
        ("S9", {"SlurmdTimeout": "300 sec"}, OK),
        ("S9", {"SlurmdTimeout": "301 sec"}, WARN),
        ("S9", {"SlurmdTimeout": "0 sec"}, PROBLEM),
        ("S9", {"SlurmdTimeout": None}, UNKNOWN),
        ("S10", {"UnkillableStepTimeout": "180 sec"}, OK),
        ("S10", {"UnkillableStepTimeout": "60 sec"}, WARN),
        ("S10", {"UnkillableStepTimeout": None}, UNKNOWN),
        ("S11", {"ReturnToService": "1"}, OK),
        ("S11", {"ReturnToService": "0"}, WARN),
        ("S11", {"ReturnToService": None}, UNKNOWN),
        ("S12", {"MaxBatchRequeue": None}, OK),
        ("S12", {"MaxBatchRequeue": "5"}, OK),
        ("S12", {"MaxBatchRequeue": "1"}, WARN),
        ("S13", {"SchedulerParameters": "requeue_delay=3"}, OK),
        ("S13", {}, OK),
        ("S13", {"SLURM_VERSION": "25.11.0"}, WARN),
        ("S14", {}, OK),
        ("S14", {"SLURM_VERSION": "25.11.0"}, WARN),
        ("S14", {"SlurmctldParameters": "idle_on_node_suspend,enable_expedited_requeue"}, OK),
        ("S15", {}, OK),
        ("S15", _PROLOG, WARN),
        ("S15", {**_PROLOG, "SchedulerParameters": "nohold_on_prolog_fail"}, OK),
        ("S16", {}, OK),
        ("S16", _PROLOG, WARN),
        ("S16", {**_PROLOG, "PrologFlags": "Contain"}, WARN),
        ("S16", {**_PROLOG, "PrologFlags": "Contain,DeferBatch"}, OK),
        ("S16", {"PrologFlags": None}, UNKNOWN),
        ("S17", {}, OK),
        ("S17", _PROLOG, WARN),
        ("S17", {"Epilog": "/opt/epilog"}, WARN),
        ("S17", {**_PROLOG, "PrologEpilogTimeout": "120 sec"}, OK),
        ("S17", {**_PROLOG, "PrologTimeout": "120 sec", "EpilogTimeout": "UNLIMITED"}, WARN),
        ("S17", {"PrologEpilogTimeout": None}, UNKNOWN),
        ("S17", {**_PROLOG, "PrologEpilogTimeout": "60 sec"}, OK),
        ("S17", {"Epilog": "/etc/nvrx/epilog.d/*", "PrologEpilogTimeout": "60 sec"}, WARN),
        ("S17", {"Epilog": "/etc/nvrx/epilog.d/*", "PrologEpilogTimeout": "120 sec"}, OK),
        ("S18", {"PreemptMode": "GANG,REQUEUE"}, OK),
        ("S18", {"PreemptMode": "CANCEL"}, WARN),
        ("S18", {"PreemptMode": None}, UNKNOWN),
        ("S19", {"JobFileAppend": "1"}, OK),
        ("S19", {"JobFileAppend": None}, UNKNOWN),
    ],
)
def test_each_setting_is_judged(rule: str, values: dict[str, str | None], status: Status) -> None:
    found = of_rule(rule, changed(CAPTURED, **values))
    assert found.status is status, found
    if status in (WARN, PROBLEM):
        assert found.answer.why
        assert found.answer.fix


def test_what_nvrx_srun_overrides_is_said() -> None:
    assert "--kill-on-bad-exit=0" in of_rule("S5", changed(CAPTURED, KillOnBadExit="1")).answer.why
    assert of_rule("S5", CAPTURED).answer.why == ""


@pytest.mark.parametrize(
    ("failure", "cure"),
    [
        (FileNotFoundError("scontrol"), "login or compute node"),
        (subprocess.TimeoutExpired("scontrol", 30), "scontrol ping"),
        ("Slurmctld(primary) at ctl is DOWN\n", "administrators"),
        ("error: Munge encode failed: Failed to access munge.socket\n", "munged"),
        ("error: Munge decode failed: Expired credential\n", "munged"),
    ],
)
def test_a_slurm_that_cannot_be_asked_is_unknown_and_asked_once(failure: str | Exception, cure: str) -> None:
    commands = FakeSlurmCommands({"scontrol ping": failure})
    site = read_site(ScontrolDiagnosis({}, commands))
    (found,) = SITE.apply(site)
    assert (found.rule, found.status, site.config) == ("S1", UNKNOWN, None)
    assert cure in found.answer.fix
    assert commands.asked == ["scontrol ping"]


def test_a_site_that_answers_is_read() -> None:
    config = (DATA / "22.05" / "config.txt").read_text()
    commands = FakeSlurmCommands({"scontrol ping": UP, "scontrol show config": config})
    site = read_site(ScontrolDiagnosis({}, commands))
    assert site == Site(CAPTURED, UP.strip())
    assert [f.status for f in SITE.apply(site)] == [OK]
