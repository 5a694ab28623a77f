"""Simulated hardware on a dev cluster: what is broken is told there, and a job goes on without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.health.registry import all_checks
from nvrx_slurm.journal import CycleStarted, NodeExcluded
from nvrx_slurm.slurm.client import parse_fields

from .jobs import CLONE, TRAIN_GPT, SlurmJobs, wait_until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="a dev cluster needs root"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed: run bin/nvrx-test"),
]
BIN = Path(sys.executable).parent
STATE = "/local/health"
FAULTS = {
    "gpu.3.xid=79": ("gpu-xid", "gpu 0000:26:00"),
    "gpu.2.row_remap=failed": ("gpu-row-remap", "gpu 2"),
    "gpu.1.ecc_uncorrectable+=1": ("gpu-ecc", "gpu 1"),
    "gpu.0.lost": ("gpu-lost", "gpu 0"),
    "gpu.7.recovery_action=reset": ("gpu-recovery", "gpu 7"),
    "nvlink.4.17=down": ("nvlink-links", "gpu 4"),
    "nic.mlx5_1.link_downed+=1": ("nic-counters", "nic mlx5_1/1"),
    "nic.mlx5_2.state=DOWN": ("nic-state", "nic mlx5_2/1"),
    "nic.mlx5_8.gone": ("nic-present", "nic mlx5_8/1"),
    "lustre=unhealthy": ("lustre", "node"),
    "memory.ecc_uncorrectable=1": ("edac", "memory mc0"),
    "kernel=oops": ("kernel-trouble", "node"),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    cluster = DevCluster(f"inject{os.getpid()}")
    cluster.up(nodes=3, gpus_per_node=8, nics=9, share=[CLONE, tmp_path_factory.getbasetemp()])
    yield cluster
    cluster.down()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Failures count at first sight, and a busy machine is no reason for a time-out."""
    path = tmp_path / "health.yaml"
    checks = "".join(
        f"  {name}: {{timeout_s: 50, strikes: 1}}\n"
        for name, check in all_checks().items()
        if not check.opt_in and name != "paths"
    )
    path.write_text(
        f"budget_s: 60\njob_interval_s: 1\nchecks:\n{checks}"
        "  paths: {timeout_s: 50, answer_s: 5, strikes: 1, paths: {/storage: write}}\n"
    )
    path.chmod(0o600)
    return path


@pytest.fixture
def healthy(cluster: DevCluster) -> Iterator[DevCluster]:
    yield cluster
    for node in cluster.node_names:
        cluster.heal(node)


def inside(cluster: DevCluster, node: str, *argv: str, code: int = 0) -> str:
    done = cluster.exec(node, argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, (argv, done.stdout, done.stderr)
    return str(done.stdout)


def check(cluster: DevCluster, node: str, config: Path, only: Sequence[str] = ()) -> dict[str, set[str]]:
    """Run the checks of a prolog on a node; return ``check scope`` by status."""
    argv = [str(BIN / "nvrx-health"), "check", "--stage", "prolog", "--json"]
    options = ["--config", str(config), "--state-dir", STATE, *(f"--only={name}" for name in only)]
    done = cluster.exec(node, [*argv, *options], capture_output=True, text=True, timeout=240)
    found: dict[str, set[str]] = {}
    for result in json.loads(done.stdout)["results"]:
        found.setdefault(result["status"], set()).add(f"{result['check']} {result['scope']}")
    return found


def test_what_is_broken_on_a_node_is_told_there_and_nowhere_else_until_it_is_healed(
    healthy: DevCluster, config: Path
) -> None:
    for node in ("n1", "n2"):
        inside(healthy, node, str(BIN / "nvrx-health"), "baseline", "--state-dir", STATE)
        assert not {"fail", "warn"} & set(check(healthy, node, config)), node
    healthy.inject("n2", list(FAULTS))
    assert check(healthy, "n2", config)["fail"] == {f"{name} {scope}" for name, scope in FAULTS.values()}
    assert "fail" not in check(healthy, "n1", config)
    healthy.heal("n2")
    assert not {"fail", "warn"} & set(check(healthy, "n2", config))


def test_a_fault_outlives_a_loss_of_power(healthy: DevCluster, config: Path) -> None:
    healthy.inject("n3", ["gpu.2.row_remap=failed", "nic.mlx5_4.state=DOWN"])
    healthy.kill_node("n3")
    healthy.restore_node("n3")
    found = check(healthy, "n3", config, ["gpu-row-remap", "nic-state"])
    assert found["fail"] == {"gpu-row-remap gpu 2"}
    assert found["warn"] == {"nic-state nic mlx5_4/1"}


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this kernel has no FUSE")
def test_storage_that_hangs_holds_a_process_that_even_sigkill_does_not_end(
    healthy: DevCluster, config: Path
) -> None:
    assert check(healthy, "n2", config, ["paths", "space"]) == {"ok": {"paths node", "space node"}}
    healthy.inject("n2", ["storage.hang"])
    touch = "stat /storage >/dev/null 2>&1 & echo $!"
    pid = inside(healthy, "n2", "sh", "-c", touch).strip()

    def state() -> str:
        return inside(healthy, "n2", "sh", "-c", f"cut -d' ' -f3 /proc/{pid}/stat 2>/dev/null; true").strip()

    inside(healthy, "n2", "sh", "-c", f"kill -9 {pid}")
    wait_until("it is in state D, killed and alive", lambda: state() == "D")
    assert check(healthy, "n2", config, ["paths"]) == {"fail": {"paths path /storage"}}
    assert check(healthy, "n1", config, ["paths"]) == {"ok": {"paths node"}}
    assert state() == "D"
    healthy.heal("n2")
    wait_until("it has died", lambda: state() in ("", "Z"))
    assert check(healthy, "n2", config, ["paths"]) == {"ok": {"paths node"}}


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this kernel has no FUSE")
@pytest.mark.parametrize(
    ("mode", "says"), [("stale", "Stale file handle"), ("io_error", "Input/output error")]
)
def test_storage_whose_server_fails_gives_its_error(
    healthy: DevCluster, config: Path, mode: str, says: str
) -> None:
    healthy.inject("n2", [f"storage.{mode}"])
    done = healthy.exec("n2", ["stat", "/storage"], capture_output=True, text=True, timeout=240)
    assert says in done.stderr
    assert check(healthy, "n2", config, ["paths"]) == {"fail": {"paths path /storage"}}
    healthy.inject("n2", ["storage.ok"])
    assert check(healthy, "n2", config, ["paths"]) == {"ok": {"paths node"}}


@pytest.mark.timeout(420)
def test_a_spare_takes_the_place_of_a_node_whose_gpu_falls_off_the_bus(
    healthy: DevCluster, config: Path, tmp_path: Path
) -> None:
    slurm = SlurmJobs(healthy, tmp_path)
    try:
        job = slurm.submit(
            *("--nproc-per-node=2", "--spares=1", f"--health-config={config}", str(TRAIN_GPT)),
            *("--steps=100", "--layers=2", "--width=64", "--ckpt-every=10", "--step-delay=0.1"),
            nodes=3,
            sbatch=("--gpus-per-node=8",),
        )
        job.wait_for_training(cycle=0)
        first = job.events(CycleStarted)[0].event
        broken = first.nodes[1]
        healthy.inject(broken, ["gpu.3.lost"])
        assert job.wait_for_end() == 0, job.log()
        assert set(job.active_nodes()) == {first.nodes[0], first.spares[0]}
        (excluded,) = [record.event for record in job.events(NodeExcluded)]
        assert (excluded.node, excluded.reason) == (broken, "gpu-lost gpu 3: fallen off the bus")
        assert sorted(job.curve()) == list(range(1, 101))
        report = subprocess.run(
            [BIN / "nvrx-report", "--json", job.run_dir], capture_output=True, check=True, timeout=240
        ).stdout
        why = [(out["node"], out["why"]) for out in json.loads(report)["nodes_excluded"]]
        assert why == [(broken, excluded.reason)]
        healthy.heal(broken)
        assert check(healthy, broken, config, ["gpu-lost"]) == {"ok": {"gpu-lost node"}}
    finally:
        slurm.clean_up()


def test_a_job_never_begins_on_a_node_whose_prolog_finds_a_broken_gpu(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """With the hooks that install-hooks writes, on a cluster of their own."""
    prefix = tmp_path_factory.mktemp("site") / "nvrx"
    install = [str(BIN / "nvrx-health"), "install-hooks", "--prefix", str(prefix)]
    lines = subprocess.run(
        install, capture_output=True, text=True, check=True, timeout=240
    ).stdout.splitlines()
    hooked = [line for line in lines if line.startswith(("Prolog", "Epilog"))]
    cluster = DevCluster(f"hookedsim{os.getpid()}")
    share = [tmp_path_factory.getbasetemp()]
    (prefix / "health.yaml").write_text(
        "state_dir: /local/health\nbudget_s: 60\n"
        f"hooks: {{slurm_conf: {cluster.slurm_conf}, brake_share: 1}}\n"
        "checks: {gpu-row-remap: {timeout_s: 50}, gpu-count: {timeout_s: 50}}\n"
    )
    environ = {**os.environ, "SLURM_CONF": str(cluster.slurm_conf)}

    def slurm(*argv: str) -> str:
        return subprocess.run(
            argv, env=environ, cwd="/", capture_output=True, text=True, timeout=240, check=True
        ).stdout

    try:
        cluster.up(nodes=2, gpus_per_node=8, nics=9, share=share, slurm_conf=hooked)
        cluster.inject("n1", ["gpu.2.row_remap=failed"])
        options = ["--parsable", "--gpus-per-node=8", "--output=/dev/null", "--wrap=true"]
        job = slurm("sbatch", *options).strip()
        fields: dict[str, str] = {}

        def over() -> bool:
            fields.update(parse_fields(slurm("scontrol", "-o", "show", "job", job)))
            return fields["JobState"] == "COMPLETED"

        wait_until(f"job {job} is done", over)
        assert (fields["NodeList"], fields["Restarts"]) == ("n2", "1")
        reason = slurm("sinfo", "-h", "-n", "n1", "-o", "%E")
        assert reason.startswith("nvrx:gpu-row-remap:gpu-2:isolate ")
        assert reason.strip().endswith("row remap failed")
        assert slurm("sinfo", "-h", "-n", "n2", "-o", "%E").strip() == "none"
    finally:
        cluster.down()


def test_a_fault_that_there_is_not_is_refused_and_nothing_is_broken(
    healthy: DevCluster, config: Path
) -> None:
    argv = [str(BIN / "nvrx-devcluster"), "inject", "--name", healthy.name, "n1"]
    for faults, says in (
        (["gpu.0.lost", "gpu.8.lost"], "this node has GPU 0 to 7"),
        (["gpu.0.lost", "gpu.1.losst"], "did you mean gpu.N.lost?"),
    ):
        done = subprocess.run([*argv, *faults], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 2
        assert says in done.stderr
    assert check(healthy, "n1", config, ["gpu-lost"]) == {"ok": {"gpu-lost node"}}


def test_the_machine_itself_does_not_see_the_simulated_driver(healthy: DevCluster) -> None:
    assert "libnvidia-ml.so.1" in inside(healthy, "n1", "ldconfig", "-p")
    assert (
        healthy.name
        not in subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    )
