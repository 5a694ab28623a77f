"""The hooks on a real Slurm: slurmd runs them as root, from the lines that install-hooks prints.

Faults are files in a node's own state directory, which a site script of the test's reads, or simulated.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.health.reasons import parse_reason
from nvrx_slurm.hooks.install import hook_text
from nvrx_slurm.slurm.accusation import Accusation, parse_accusation, with_accusation
from nvrx_slurm.slurm.administration import NodeRecord, ScontrolAdmin
from nvrx_slurm.slurm.client import parse_fields

from .jobs import NVRX_SRUN, wait_until

pytestmark = pytest.mark.slurm

NVRX_HEALTH = str(Path(sys.executable).with_name("nvrx-health"))
NODES = 6
NOBODY = 65534
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_SCHEDULE = "sched_interval=1,bf_interval=1,batch_sched_delay=0"
_FAN = """#!/bin/sh
for fault in broken.$NVRX_STAGE ${NVRX_ACCUSED:+broken.accused}; do
    cat "/run/nvrx-node/$fault" 2>/dev/null && exit 2
done
exit 0
"""


@dataclass
class Site:
    """A cluster whose nodes have our hooks, and their configuration."""

    cluster: DevCluster
    prefix: Path

    def __post_init__(self) -> None:
        self.environ = {**os.environ, **self.cluster.environment()}
        self.admin = ScontrolAdmin(self.environ, timeout_s=30)

    # --- Slurm -------------------------------------------------------------------------------------------

    def run(self, *argv: str, user: int | None = None) -> str:
        done = subprocess.run(
            argv,
            env=self.environ,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            user=user,
        )
        assert done.returncode == 0, f"{argv}: {done.returncode} {done.stdout} {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str, user: int | None = None) -> str:
        quiet = ("--parsable", "--output=/dev/null", "--chdir=/")
        return self.run("sbatch", *quiet, *options, f"--wrap={script}", user=user).strip()

    def job(self, job_id: str) -> dict[str, str]:
        return parse_fields(self.run("scontrol", "-o", "show", "job", job_id))

    def finish(self, job_id: str) -> dict[str, str]:
        """Wait until the job and its epilogs have ended; return the job."""
        held: list[str] = []

        def over() -> bool:
            job = self.job(job_id)
            held.extend([job["Reason"]] if job["Priority"] == "0" else [])
            return job["JobState"] in _OVER

        wait_until(f"end of job {job_id}", over)
        assert held == [], f"job {job_id} was held: nobody releases it at night"
        return self.job(job_id)

    def node(self, name: str) -> NodeRecord:
        return next(record for record in self.admin.node_records() if record.name == name)

    def drained(self) -> dict[str, str]:
        return {record.name: record.reason for record in self.admin.node_records() if record.drained}

    # --- nodes -------------------------------------------------------------------------------------------

    def break_node(self, node: str, stage: str, why: str = "the fan is off") -> None:
        path = self.cluster.run_dir_of(node) / f"broken.{stage}"
        new = path.with_suffix(".new")
        new.write_text(why + "\n")
        new.rename(path)

    def mend_node(self, node: str) -> None:
        for fault in self.cluster.run_dir_of(node).glob("broken.*"):
            fault.unlink()

    def on(self, node: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.exec(
            node,
            argv,
            env={**environ, **self.cluster.environment()},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def health(self, node: str, *argv: str) -> subprocess.CompletedProcess[str]:
        """``nvrx-health`` on the node, as an administrator runs it there."""
        command = str(self.prefix / "bin" / "nvrx-health")
        return self.on(node, command, *argv, PATH=os.environ["PATH"])

    # --- the site's decisions ----------------------------------------------------------------------------

    def configure(self, hooks: str = "brake_share: 1") -> None:
        conf = self.cluster.slurm_conf
        self._write(
            "state_dir: /run/nvrx-node/health\n"
            "budget_s: 60\n"
            f"hooks: {{slurm_conf: {conf}, deep_checks: [], {hooks}}}\n"
            f"checks: {{site-scripts: {{directory: {self.prefix}/checks.d, timeout_s: 50, answer_s: 45}}}}\n"
        )

    def misconfigure(self) -> None:
        self._write("chekcs: {}\n")

    def _write(self, text: str) -> None:
        new = self.prefix / "health.yaml.new"
        new.write_text(text)
        new.chmod(0o644)
        new.rename(self.prefix / "health.yaml")

    def clean_up(self) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environ, check=False)
        subprocess.run(["scancel", "--user=nobody"], env=self.environ, check=False)
        wait_until("all jobs gone", lambda: not self.run("squeue", "-h").strip())
        for name in self.cluster.node_names:
            self.mend_node(name)
        for name in self.drained():
            self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        self.configure()


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("a dev cluster needs root")
    if shutil.which("slurmctld") is None:
        pytest.skip("Slurm is not installed: run bin/nvrx-test")
    prefix = tmp_path_factory.mktemp("site") / "nvrx"
    install = [NVRX_HEALTH, "install-hooks", "--prefix", str(prefix)]
    done = subprocess.run(install, capture_output=True, text=True, check=True, timeout=240)
    # HealthCheckProgram runs as soon as a slurmd is up, and the nodes share the host's /var/lib.
    config = prefix / "health.yaml"
    config.write_text(f"state_dir: /run/nvrx-node/health\n{config.read_text()}")
    # Joined with what the cluster's slurm.conf has there, as the command says.
    lines = [
        line.replace("SchedulerParameters=", f"SchedulerParameters={_SCHEDULE},")
        for line in done.stdout.splitlines()
    ]
    script = prefix / "checks.d" / "fan"
    script.write_text(_FAN)
    script.chmod(0o755)
    cluster = DevCluster(f"hook{os.getpid()}")
    shares = [tmp_path_factory.getbasetemp()]
    cluster.up(nodes=NODES, gpus_per_node=2, nics=2, share=shares, slurm_conf=lines)
    try:
        yield Site(cluster, prefix)
    finally:
        cluster.down()


@pytest.fixture
def site(hooked: Site) -> Iterator[Site]:
    hooked.configure()
    yield hooked
    hooked.clean_up()


# --- found by the prolog -----------------------------------------------------------------------------------


def test_a_node_that_is_broken_before_the_job_begins_is_drained_and_the_job_goes_elsewhere(
    site: Site,
) -> None:
    site.break_node("n1", "prolog")
    site.break_node("n1", "manual")
    job = site.finish(site.submit("true", "-N2"))
    assert (job["JobState"], job["Restarts"], job["NodeList"]) == ("COMPLETED", "1", "n[2-3]")
    assert job["BatchFlag"] == "1", "counts towards MaxBatchRequeue"
    assert list(site.drained()) == ["n1"]
    reason = parse_reason(site.drained()["n1"])
    assert reason is not None
    assert (reason.check, reason.scope, reason.detail) == ("site-scripts", "script-fan", "the fan is off")
    # It is listed, and comes back only when it is well.
    (listed,) = json.loads(site.run(NVRX_HEALTH, "nodes", "--json"))["nodes"]
    assert (listed["node"], listed["who"], listed["ours"]["check"]) == ("n1", "root", "site-scripts")
    refused = site.health("n1", "resume", "n1")
    assert refused.returncode == 3
    assert "stays drained: something still fails" in refused.stderr
    assert list(site.drained()) == ["n1"]
    site.mend_node("n1")
    resumed = site.health("n1", "resume", "n1")
    assert (resumed.returncode, "n1 is back in service" in resumed.stdout) == (0, True), resumed.stderr
    assert site.drained() == {}


def test_of_an_array_only_the_task_whose_node_is_broken_starts_again(site: Site) -> None:
    """The last task has the id of the array, and gets the last node: an order for that id is one for all."""
    site.break_node("n6", "prolog")
    go_on = site.prefix / "the_array_goes_on"
    waits = f"until [ -e {go_on} ]; do sleep 0.1; done"
    array = site.submit(waits, "--array=1-3", "-N1", "--exclusive", "-x", "n[1-3]")
    wait_until("all tasks have had a node", lambda: "n6" in site.drained())
    go_on.touch()
    wait_until("the array", lambda: not site.run("squeue", "-h", "-j", array).strip())
    told = site.run("scontrol", "-o", "show", "job", array).splitlines()
    tasks = [parse_fields(line) for line in told if line.startswith("JobId=")]
    assert [task["JobState"] for task in tasks] == ["COMPLETED"] * 3
    assert {task["JobId"]: task["Restarts"] for task in tasks if task["Restarts"] != "0"} == {array: "1"}


def test_the_brake_keeps_one_reason_from_draining_the_partition(site: Site) -> None:
    """Both nodes of the job find it in the same moment: one is drained, and the other gives way."""
    site.configure("brake_share: 0.1")
    for node in ("n2", "n3"):
        site.break_node(node, "prolog", "the file server is gone")
    job = site.finish(site.submit("true", "-N2", "-x", "n1"))
    assert job["JobState"] == "COMPLETED"
    (drained,) = site.drained()
    assert drained in ("n2", "n3")


# --- found by the epilog -----------------------------------------------------------------------------------


def test_a_node_that_breaks_during_a_job_is_drained_before_the_next_one(site: Site) -> None:
    site.break_node("n1", "epilog")
    assert site.finish(site.submit("true", "-x", "n2,n3,n4,n5"))["NodeList"] == "n1"
    wait_until("n1 is drained", lambda: "n1" in site.drained())
    assert site.drained()["n1"].startswith("nvrx:site-scripts:script-fan:repair ")
    assert site.finish(site.submit("true", "-x", "n2,n3,n4,n5"))["NodeList"] == "n6"


def test_an_epilog_compares_with_what_its_prolog_has_seen(site: Site) -> None:
    job_id = site.submit("touch /local/began; sleep 600", "-w", "n2")
    began = site.cluster.local_dir_of("n2") / "began"
    wait_until("the prolog has passed, and the job has begun", began.exists)
    site.cluster.inject("n2", ["nic.mlx5_1.link_downed+=1"])
    site.run("scancel", job_id)
    wait_until("n2 is drained", lambda: "n2" in site.drained())
    reason = parse_reason(site.drained()["n2"])
    assert reason is not None
    assert (reason.check, reason.scope) == ("nic-counters", "nic-mlx5_1/1")
    # The counter stays what it is: only a new baseline forgets it.
    assert site.health("n2", "resume", "n2").returncode == 3
    assert site.health("n2", "resume", "n2", "--repaired").returncode == 0
    assert site.drained() == {}


def _accusing(node: str) -> str:
    return f"--comment={with_accusation('', Accusation(0, {node: 'I say so'}))}"


@pytest.mark.parametrize(
    ("node", "accused", "broken", "drains"),
    [("n2", True, False, False), ("n3", False, True, False), ("n5", True, True, True)],
    ids=["an accusation alone", "a fault that only a deeper look finds", "both"],
)
def test_a_user_accuses_and_root_verifies(
    site: Site, node: str, accused: bool, broken: bool, drains: bool
) -> None:
    if broken:
        site.break_node(node, "accused", "slow under load")
    options = [_accusing(node)] if accused else []
    assert site.finish(site.submit("true", "-w", node, *options, user=NOBODY))["JobState"] == "COMPLETED"
    # The next prolog on the node runs after that epilog.
    if drains:
        wait_until(f"{node} is drained", lambda: node in site.drained())
    else:
        site.finish(site.submit("true", "-w", node))
        assert site.drained() == {}


def test_a_node_that_a_coordinator_leaves_out_is_looked_at_by_root(site: Site, tmp_path: Path) -> None:
    """Its checks fail inside the job, the Coordinator says so in the Comment, and the epilog verifies."""
    site.break_node("n6", "restart")
    site.break_node("n6", "accused")
    program = tmp_path / "train.py"
    program.write_text("print('trained')\n")
    job_id = site.submit(
        f"cd {tmp_path} && NVRX_RUN_DIR={tmp_path}/run exec {NVRX_SRUN} --nproc-per-node=1 --spares=1 "
        f"--health-config={site.prefix}/health.yaml {program}",
        "-N2",
        "--ntasks-per-node=1",
        "--comment=project 42",
        "-w",
        "n[5-6]",
    )
    assert site.finish(job_id)["JobState"] == "COMPLETED"
    comment = site.run("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%k")
    assert comment.startswith("project 42 nvrx{")
    assert parse_accusation(comment).bad == {"n6": "site-scripts script fan: the fan is off"}
    wait_until("n6 is drained", lambda: "n6" in site.drained())
    assert list(site.drained()) == ["n6"]


def test_what_a_user_has_left_is_cleaned_up_when_the_last_job_ends(site: Site) -> None:
    shm = "/dev/shm/left-by-nobody"
    leave = f"echo x > {shm}; setsid -f sleep 1000; exec sleep $0"
    (first, second) = (
        site.submit(f"sh -c '{leave}' {seconds}", "-w", "n4", user=NOBODY) for seconds in (600, 0)
    )
    site.on("n4", "touch", "/dev/shm/roots-own")
    site.finish(second)

    def left() -> tuple[bool, bool]:
        sleeping = site.on("n4", "pgrep", "-u", "nobody", "-f", "^sleep 1000$").returncode == 0
        return sleeping, site.on("n4", "test", "-e", shm).returncode == 0

    assert left() == (True, True), "the user has another job there"
    site.run("scancel", first)
    wait_until("all is cleaned up", lambda: left() == (False, False))
    assert site.on("n4", "test", "-e", "/dev/shm/roots-own").returncode == 0


# --- what is none of ours ----------------------------------------------------------------------------------


def test_a_reason_of_an_administrator_stays(site: Site) -> None:
    site.break_node("n3", "epilog")
    job_id = site.submit("sleep 600", "-w", "n3")
    wait_until("it runs", lambda: site.job(job_id)["JobState"] == "RUNNING")
    site.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=swapping the fan")
    site.run("scancel", job_id)
    wait_until("its epilog has run", lambda: site.node("n3").state == "idle+drain")
    assert site.drained() == {"n3": "swapping the fan"}
    refused = site.health("n3", "resume", "n3")
    assert (refused.returncode, "not by these checks" in refused.stderr) == (3, True)
    assert site.drained() == {"n3": "swapping the fan"}


# --- hooks that are broken themselves ----------------------------------------------------------------------


def _hook(site: Site, node: str, context: str) -> subprocess.CompletedProcess[str]:
    """The hook as slurmd runs it, to see what it says: slurmd shows that only when it fails."""
    kind = context.removesuffix("_slurmd")
    return site.on(
        node,
        str(site.prefix / f"{kind}.d" / "50-nvrx-health"),
        SLURM_SCRIPT_CONTEXT=context,
        SLURMD_NODENAME=node,
        SLURM_JOB_ID="4711",
    )


def test_a_broken_configuration_passes_loudly(site: Site) -> None:
    site.misconfigure()
    site.break_node("n1", "prolog")
    assert site.finish(site.submit("true", "-w", "n1"))["JobState"] == "COMPLETED"
    assert site.drained() == {}
    said = _hook(site, "n1", "prolog_slurmd")
    assert said.returncode == 0
    assert "unknown key 'chekcs'; did you mean checks?" in said.stderr
    assert "nvrx-health prolog hook is broken and passes" in said.stderr


def test_a_hook_that_takes_too_long_is_ended_and_passes(site: Site) -> None:
    scripts = [site.prefix / directory / "50-nvrx-health" for directory in ("prolog.d", "epilog.d")]
    link = site.prefix / "bin" / "nvrx-health"
    command = link.readlink()

    link.unlink()
    link.write_text("#!/bin/sh\nexec sleep 600\n")
    link.chmod(0o755)
    for script in scripts:
        script.write_text(hook_text(1))
    try:
        job = site.finish(site.submit("true", "-w", "n2"))
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
        assert site.drained() == {}
        assert "it took more than 1 s and was ended" in _hook(site, "n2", "prolog_slurmd").stderr
    finally:
        link.unlink()
        link.symlink_to(command)
        for script in scripts:
            script.write_text(hook_text(30))


# --- healthy nodes -----------------------------------------------------------------------------------------


def test_health_check_program_drains_what_fails_between_jobs(site: Site) -> None:
    program = str(site.prefix / "periodic.d" / "50-nvrx-health")
    assert site.on("n5", program, SLURMD_NODENAME="n5").returncode == 0
    assert site.drained() == {}
    site.break_node("n5", "periodic")
    # As slurmd runs it: it tells neither a job nor where slurm.conf is.
    done = site.cluster.exec(
        "n5", [program], env={"SLURMD_NODENAME": "n5"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stderr
    assert list(site.drained()) == ["n5"]


def test_fifty_jobs_on_healthy_nodes_drain_none(site: Site) -> None:
    array = site.submit("true", "--array=1-50")
    wait_until("50 jobs", lambda: not site.run("squeue", "-h", "-j", array).strip())
    told = site.run("scontrol", "-o", "show", "job", array).splitlines()
    jobs = [parse_fields(line) for line in told if line.startswith("JobId=")]
    assert [(job["JobState"], job["Restarts"]) for job in jobs] == [("COMPLETED", "0")] * 50
    assert site.drained() == {}
