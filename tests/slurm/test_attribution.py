"""Every kind of failure on a real cluster: what attribution makes of it, and what becomes of the job.

All jobs run side by side on one cluster, and do nothing but fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.journal import CycleAttributed, CycleStarted, JobEnded, Requeued, StopRequested, Verdict

from .jobs import CLONE, SlurmJob, SlurmJobs, wait_until

pytestmark = pytest.mark.slurm

PROGRAM = """
import ctypes, os, signal, sys, threading, time
cycle, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])


def wait_for_ever():
    while True:
        signal.pause()

"""
FAULTS = """
def loss():
    return float("inf") - float("inf")


def hoard():
    kept = []
    while True:
        kept.append(bytearray(os.urandom(4096)) * 4096)


def save(path):
    with open(path, "wb") as file:
        file.write(os.urandom(2 ** 20))


def hang():
    # Rank 1 is the last to give a sign of life, so its heartbeat is the newest: only the traces show that it
    # hangs. Until then no rank has a deadline, however slow the machine is.
    import torch, torch.distributed as dist
    from nvrx_slurm.fault_tolerance import RankMonitorClient
    dist.init_process_group("gloo")
    for step in range(1, 3):
        dist.all_reduce(torch.ones(1))
    store = dist.distributed_c10d._get_default_store()
    client = RankMonitorClient()
    if rank == 1:
        store.wait([f"waits {other}" for other in (0, 2, 3)])
        client.init_workload_monitoring()
        client.send_heartbeat(step=3)
        threading.Event().wait()
    client.init_workload_monitoring()
    client.send_heartbeat(step=3)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    store.set(f"waits {rank}", "")
    work.wait()


match cycle, rank:
    case 0, 1:
        raise ValueError("bad sample in shard 3")
    case 1, 2:
        os.kill(os.getpid(), signal.SIGKILL)
    case 2, 3:
        ctypes.string_at(0)
    case 3, 2:
        hoard()
    case 4, _:
        hang()
    case 5, 0:
        if loss() != loss():
            raise FloatingPointError(f"loss is {loss()} at step 7")
    case 6, 0:
        save("/local/full/step_10.pt")
    case 8, _:
        while not os.path.exists(f"{os.path.dirname(__file__)}/go"):
            time.sleep(0.1)
        sys.exit(0)
wait_for_ever()
"""
MISSING_MODULE = "import no_such_module\n"
WRONG_ARGUMENT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float)
parser.parse_args()
wait_for_ever()
"""
SAVES = """
if not os.path.exists("/local/room"):
    with open("/local/full/step_10.pt", "wb") as file:
        file.write(os.urandom(2 ** 20))
"""
TRAINS = "wait_for_ever()\n"
SAVES_WHEN_ASKED = """
import time
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
while not client.should_stop():
    client.send_heartbeat()
    time.sleep(0.1)
"""
NO_RESTART = ("--ft-attribution-stop-action=no-restart", "--max-restarts=50", "--max-no-progress-cycles=0")

TABLE = [
    ("code.exception", "restart", 1, "n2"),
    ("host.sigkill", "restart", 2, "n3"),
    ("host.segfault", "restart", 3, "n3"),
    ("mem.host_oom", "restart", 2, "n3"),
    ("job.hang", "restart", 1, "n2"),
    ("num.loss_nan", "restart", 0, "n2"),
    ("storage.no_space", "hold", 0, "n2"),
    ("slurm.node_fail", "restart_exclude", None, "n3"),
]
"""Of each cycle of the job that fails in every way: the cause, what would be done, and whose fault it is.
n1, the batch host, is the spare."""
LAST = len(TABLE) - 1
FAN = """#!/bin/sh
[ ! -e /run/nvrx-node/broken ] || exit 1
"""


def _memory_cgroup() -> tuple[Path, str] | None:
    """The memory cgroup of this process, and the name of its limit's file."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") and (v1 / path.lstrip("/")).is_dir():
            return v1 / path.lstrip("/"), "memory.limit_in_bytes"
    root = v2 / "cgroup.subtree_control"
    return (v2, "memory.max") if root.exists() and "memory" in root.read_text().split() else None


@dataclass
class Site:
    """A cluster with one node of little memory, one of little disk, and one whose prolog fails."""

    cluster: DevCluster
    jobs: SlurmJobs
    directory: Path
    has_memory_limit: bool

    def job(
        self,
        name: str,
        program: str,
        *options: str,
        nodes: str,
        sbatch: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
    ) -> SlurmJob:
        script = self.directory / f"{name}.py"
        script.write_text(PROGRAM + program)
        count = len(self.jobs.run("scontrol", "show", "hostnames", nodes).split())
        return self.jobs.submit(
            "--health=off",
            *options,
            str(script),
            *arguments,
            nodes=count,
            name=name,
            sbatch=(f"--nodelist={nodes}", *sbatch),
        )

    @property
    def slurmctld_log(self) -> Path:
        found = re.search(r"^SlurmctldLogFile=(.*)$", self.cluster.slurm_conf.read_text(), re.M)
        assert found is not None
        return Path(found.group(1))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("a dev cluster needs root")
    if shutil.which("slurmctld") is None:
        pytest.skip("Slurm is not installed: run bin/nvrx-test")
    directory = tmp_path_factory.mktemp("attribution")
    prolog = directory / "prolog"
    prolog.write_text(FAN)
    prolog.chmod(0o755)
    cluster = DevCluster(f"attr{os.getpid()}")
    lines = [f"Prolog={prolog}", "PrologFlags=Alloc"]
    cluster.up(nodes=6, gpus_per_node=2, share=[CLONE, tmp_path_factory.getbasetemp()], slurm_conf=lines)
    cgroup = None
    try:
        cgroup = _with_little_memory(cluster, "n3")
        for node in ("n2", "n5"):
            mount = "mkdir -p /local/full && mount -t tmpfs -o size=256k tmpfs /local/full"
            cluster.exec(node, ["sh", "-c", mount], check=True)
        (cluster.run_dir_of("n6") / "broken").touch()
        site = Site(cluster, SlurmJobs(cluster, directory), directory, cgroup is not None)
        yield site
    finally:
        cluster.down()
        if cgroup is not None:
            cgroup.rmdir()


def _with_little_memory(cluster: DevCluster, node: str) -> Path | None:
    """Put what the node starts from now on into a cgroup with a limit; None: this machine allows none."""
    found = _memory_cgroup()
    if found is None:
        return None
    folder = found[0] / f"nvrx-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / found[1]).write_text(str(2**30))
    except OSError:
        return None
    move = f"for pid in $(pgrep -x slurmd); do echo $pid > {folder}/cgroup.procs; done"
    cluster.exec(node, ["sh", "-c", move], check=True)
    return folder


@dataclass
class Jobs:
    """All of them, submitted at once."""

    every: SlurmJob
    missing: SlurmJob
    argument: SlurmJob
    cancelled: SlurmJob
    limit: SlurmJob
    full: SlurmJob
    prolog: SlurmJob


@pytest.fixture(scope="module")
def jobs(site: Site) -> Jobs:
    policy = site.directory / "policy.yaml"
    policy.write_text("no_checkpoint_attempts: 99\nmax_restarts_per_hour: 99\nmax_restarts: 99\n")
    chain = ("--spares=1", "--nproc-per-node=2", "--heartbeat-timeout=5s", "--rejoin-timeout=5s")
    one = ("--nproc-per-node=1",)
    limit = ("--time=1", "--no-requeue")
    return Jobs(
        every=site.job(
            "every",
            FAULTS,
            *(*chain, "--max-restarts=50", "--max-no-progress-cycles=0", "--exclude-after=0"),
            nodes="n[1-3]",
            sbatch=(f"--export=ALL,NVRX_ATTRIBUTION_POLICY={policy}",),
        ),
        prolog=site.job("prolog", TRAINS, *one, nodes="n6"),
        missing=site.job("missing", MISSING_MODULE, *one, *NO_RESTART, nodes="n4"),
        full=site.job("full", SAVES, *one, *NO_RESTART, nodes="n5"),
        argument=site.job(
            "argument", WRONG_ARGUMENT, *one, *NO_RESTART, nodes="n4", arguments=("--lerning-rate=3",)
        ),
        limit=site.job("limit", SAVES_WHEN_ASKED, *one, "--time-limit-margin=55s", nodes="n4", sbatch=limit),
        cancelled=site.job("cancelled", TRAINS, *one, nodes="n5"),
    )


def attributed(job: SlurmJob) -> dict[int, CycleAttributed]:
    return {record.cycle: record.event for record in job.events(CycleAttributed)}


def report(job: SlurmJob) -> str:
    done = subprocess.run(
        [CLONE / "bin" / "nvrx-report", job.run_dir], capture_output=True, text=True, check=True, timeout=240
    )
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(("which", "category"), [("missing", "code.import"), ("argument", "code.bad_args")])
def test_what_a_user_has_got_wrong_ends_the_job_after_its_second_try(
    jobs: Jobs, which: str, category: str
) -> None:
    job: SlurmJob = getattr(jobs, which)
    assert job.wait_for_end() == 93, job.log()
    found = attributed(job)
    assert (found[0].category, found[0].action, found[0].rule) == (category, "stop", "4-deterministic")
    assert job.events(Verdict)[-1].event.rule == "4-deterministic"
    assert len(job.events(CycleStarted)) == 2, job.log()
    assert found[0].exclude == []


def test_a_user_who_cancels_a_job_wants_no_other_try(site: Site, jobs: Jobs) -> None:
    job = jobs.cancelled
    job.wait_for(CycleStarted, 0)
    site.jobs.run("scancel", job.job_id)
    job.wait_for_end()
    said = job.attribution(0)
    assert (said["primary"]["category"], said["decision"]["rule"]) == ("slurm.cancelled", "1-over")
    assert said["decision"]["exclude"] == []


def test_the_time_limit_is_nobodys_fault(jobs: Jobs) -> None:
    job = jobs.limit
    assert job.wait_for(StopRequested, 0).event.by.startswith("the time limit, ")
    job.wait_for_end()
    assert job.events(JobEnded)[-1].event.code == 75
    said = job.attribution(0)
    assert (said["primary"]["category"], said["decision"]["rule"]) == ("slurm.time_limit", "3-time-limit")
    assert (said["culprits"], said["decision"]["counted"]) == ([], False)


def test_a_full_disk_has_the_job_held_until_somebody_releases_it(site: Site, jobs: Jobs) -> None:
    job = jobs.full
    wait_until("it is requeued", lambda: bool(job.events(Requeued)))
    requeued = job.events(Requeued)[0].event
    found = attributed(job)[0]
    assert (found.category, found.action, found.exclude) == ("storage.no_space", "hold", [])
    assert "a file system is full" in requeued.held
    wait_until("Slurm holds it", lambda: job.slurm_fields()["JobState"] == "PENDING")
    assert job.slurm_fields()["Priority"] == "0"
    assert f"HELD: when there is room, scontrol release {job.job_id}" in report(job)
    assert f"scontrol release {job.job_id}" in job.log()
    # When there is room, it goes on.
    site.cluster.exec("n5", ["touch", "/local/room"], check=True)
    site.jobs.run("scontrol", "release", job.job_id)
    wait_until("it runs again", lambda: job.slurm_fields()["JobState"] == "RUNNING")


def test_a_failed_prolog_names_its_node_though_other_jobs_are_in_slurms_log(site: Site, jobs: Jobs) -> None:
    job = jobs.prolog
    wait_until("Slurm gives up", lambda: job.slurm_fields()["JobState"] == "PENDING")
    command = [CLONE / "bin" / "nvrx-attribute", "log", "--slurm-log", site.slurmctld_log]
    done = subprocess.run(
        [*command, "--job", job.job_id, "--json"], capture_output=True, timeout=240, check=True
    )
    said = json.loads(done.stdout)
    assert said["primary"]["category"] == "slurm.prolog_failed"
    assert (said["decision"]["action"], said["decision"]["exclude"]) == ("restart_exclude", ["n6"])


def test_every_other_fault_gets_its_verdict_and_a_lost_node_is_left_out(site: Site, jobs: Jobs) -> None:
    job = jobs.every
    job.wait_for(CycleStarted, LAST)
    wait_until("cycle 7 runs", lambda: len(job.place_of(3)) == 2)
    site.cluster.kill_node("n3")
    job.wait_for(CycleAttributed, LAST, 60)  # a job that ends well waits for no verdict
    (site.directory / "go").touch()
    assert job.wait_for_end() == 0, job.log()
    found = attributed(job)
    for cycle, (category, action, rank, node) in enumerate(TABLE):
        event = found[cycle]
        if category == "mem.host_oom" and not site.has_memory_limit:
            continue
        assert (event.category, event.action) == (category, action), (cycle, event)
        first = event.culprits[0]
        assert rank in (None, first.rank), (cycle, event)
        assert node == first.node, (cycle, event)
    # What a program does, even twice on one node, costs that node nothing; the lost one is left out.
    assert [found[cycle].exclude for cycle in sorted(found)] == [[]] * LAST + [["n3"]]
    assert found[4].culprits[0].by_traces
    assert "n3" not in job.active_nodes()
