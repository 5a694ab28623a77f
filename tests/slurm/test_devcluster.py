"""The dev cluster for real: it comes up, its nodes can be lost and found, and it leaves no trace."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nvrx_slurm.devcluster import DevCluster, DevClusterError, Link, Power, network, preflight, state
from nvrx_slurm.devcluster.state import Layout, Phase


def _why_not() -> str:
    if os.geteuid() != 0:
        return "a dev cluster needs root"
    try:
        preflight.find_programs("slurmctld", "slurmd", "munged", "ip")
    except DevClusterError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(_why_not()), reason=_why_not()),
]

COMMAND = str(Path(sys.executable).with_name("nvrx-devcluster"))
NAME = f"t{os.getpid()}"


def devcluster(*arguments: str, name: str = NAME) -> subprocess.CompletedProcess[str]:
    command, *rest = arguments
    return subprocess.run(
        [COMMAND, command, "--name", name, *rest], capture_output=True, text=True, timeout=240, check=False
    )


def slurm(cluster: DevCluster, *argv: str) -> str:
    environment = {**os.environ, **cluster.environment()}
    done = subprocess.run(
        argv, env=environment, cwd="/", capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(what: str, condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.05)


def processes_of(name: str) -> list[str]:
    """Everything that runs for a cluster: its machines, daemons, jobs and what was started in its nodes."""
    marks = (f"/{name}/etc/slurm.conf".encode(), f"\0{name}/".encode())
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                text = (entry / "environ").read_bytes() + b"\0" + (entry / "cmdline").read_bytes()
                if any(mark in text for mark in marks):
                    found.append(f"{entry.name}: {(entry / 'cmdline').read_bytes()!r}")
    return found


def traces_of(name: str, links_before: set[str]) -> dict[str, object]:
    """What is left of a cluster, without what belongs to others that run meanwhile."""
    others = [network.Subnet(index) for index in state.used_slots()]
    links = {
        link
        for link in set(network.interfaces()) - links_before
        if not any(subnet.owns(link) for subnet in others)
    }
    files = [path for path in (state.BASE / name, state.BASE / f"{name}.lock") if path.exists()]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"/{name}/" in line]
    return {
        kind: found
        for kind, found in {
            "processes": processes_of(name),
            "links": links,
            "files": files,
            "mounts": mounts,
        }.items()
        if found
    }


def count(argument: str) -> int:
    """How many processes have exactly this argument: a way to tell the sleepers of a test apart."""
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += process.status() != psutil.STATUS_ZOMBIE and argument in process.cmdline()[1:2]
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    cluster = DevCluster(NAME)
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture
def healthy(cluster: DevCluster) -> Iterator[DevCluster]:
    """The cluster with all its nodes and without jobs, before and after."""
    yield cluster
    slurm(cluster, "scancel", "--user=root")
    cluster.up()
    wait_for("no job is left", lambda: slurm(cluster, "squeue", "-h") == "")
    wait_until_idle(cluster)


def wait_until_idle(cluster: DevCluster) -> None:
    """A node is completing for a moment after its last job."""
    wait_for("idle nodes", lambda: set(slurm(cluster, "sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"})


@pytest.fixture
def other_name() -> Iterator[str]:
    """The name of a cluster of this test's own."""
    name = f"{NAME}x"
    yield name
    DevCluster(name).down()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every node sees: not below /tmp."""
    path = Path(tempfile.mkdtemp(dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


def test_after_up_four_nodes_run_a_step(other_name: str) -> None:
    assert devcluster("up", name=other_name).returncode == 0
    names = slurm(DevCluster(other_name), "srun", "-N4", "hostname").split()

    assert sorted(names) == ["n1", "n2", "n3", "n4"]


def test_down_leaves_the_machine_as_it_was(other_name: str) -> None:
    links = set(network.interfaces())
    mounts = Path("/proc/mounts").read_text()
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    other = DevCluster(other_name)
    other.up(nodes=3, gpus_per_node=1)
    slurm(other, "sbatch", "-N3", "-o", "/dev/null", "--wrap", "srun sleep 3600")
    wait_for("a running job", lambda: "RUNNING" in slurm(other, "squeue", "-h", "-o", "%T"))
    other.kill_node("n3")
    other.partition_node("n2")
    with subprocess.Popen([COMMAND, "exec", "--name", other_name, "1", "--", "sleep", "3600"]) as visitor:
        wait_for("the visitor", lambda: len(processes_of(other_name)) > 0)
        assert devcluster("down", name=other_name).returncode == 0
        assert visitor.wait(100) != 0

    assert traces_of(other_name, links) == {}
    assert Path("/proc/mounts").read_text() == mounts
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout == namespaces
    again = devcluster("down", name=other_name)
    assert (again.returncode, again.stdout) == (0, f"cluster '{other_name}' was not up\n")


@pytest.mark.parametrize(
    "reached", [".lock", "/state.json", "/etc/hosts", "/pids/ctl.pid", "/pids/n4.pid", "/nodes/n2/spool/*"]
)
def test_down_cleans_up_after_an_up_that_was_killed(other_name: str, reached: str) -> None:
    links = set(network.interfaces())
    with subprocess.Popen([COMMAND, "up", "--name", other_name], stdout=subprocess.DEVNULL) as up:
        while not list(state.BASE.glob(other_name + reached)) and up.poll() is None:
            pass
        up.kill()

    done = devcluster("down", name=other_name)

    assert done.returncode == 0, done.stderr
    assert traces_of(other_name, links) == {}


def test_up_starts_afresh_after_an_up_that_was_killed(other_name: str) -> None:
    root = Layout.of(other_name).root
    with subprocess.Popen([COMMAND, "up", "--name", other_name], stdout=subprocess.DEVNULL) as up:
        wait_for("a machine of the first up", lambda: bool(list(root.glob("pids/n1.pid"))))
        up.kill()

    assert devcluster("up", "--nodes", "2", name=other_name).returncode == 0
    assert sorted(slurm(DevCluster(other_name), "srun", "-N2", "hostname").split()) == ["n1", "n2"]


def test_of_two_ups_at_once_one_wins(other_name: str) -> None:
    ups = [
        subprocess.Popen([COMMAND, "up", "--name", other_name], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [up.communicate(timeout=240)[1] for up in ups]

    lost = [up for up in ups if up.returncode != 0]
    assert len(lost) <= 1  # none, when the second came so late that it found the cluster up
    for up, text in zip(ups, said, strict=True):
        if up in lost:
            assert up.returncode == 2
            assert text.startswith("Error: another nvrx-devcluster command (up, process ")
            assert text.count("\n") == 1
    assert sorted(slurm(DevCluster(other_name), "srun", "-N4", "hostname").split()) == [
        "n1",
        "n2",
        "n3",
        "n4",
    ]


def test_an_up_while_another_command_works_is_refused_at_once(other_name: str) -> None:
    with state.cluster_lock(Layout.of(other_name), "down", 0):
        done = devcluster("up", name=other_name)

    assert done.returncode == 2
    assert "another nvrx-devcluster command (down, process" in done.stderr


def test_up_again_uses_what_is_there(cluster: DevCluster) -> None:
    before = processes_of(NAME)

    assert devcluster("up").returncode == 0

    assert processes_of(NAME) == before


def test_up_in_another_shape_is_refused(cluster: DevCluster) -> None:
    done = devcluster("up", "--nodes", "3")

    assert done.returncode == 2
    assert "is already up with 4 nodes of 2 GPUs: take it down first" in done.stderr
    done = devcluster("up", "--gpus-per-node", "2", "--hardware")
    assert done.returncode == 2
    assert "is already up with 4 nodes of 2 GPUs without simulated hardware: take it" in done.stderr


def test_two_clusters_do_not_see_each_other(cluster: DevCluster, other_name: str) -> None:
    other = DevCluster(other_name)
    other.up(nodes=1, gpus_per_node=0)

    one, two = cluster.status(), other.status()

    assert one is not None
    assert two is not None
    assert one.subnet != two.subnet
    assert len(slurm(cluster, "sinfo", "-h", "-N").splitlines()) == 4
    assert len(slurm(other, "sinfo", "-h", "-N").splitlines()) == 1
    other.down()
    assert sorted(slurm(cluster, "srun", "-N4", "hostname").split()) == ["n1", "n2", "n3", "n4"]


def test_status_and_env_tell_all(cluster: DevCluster) -> None:
    wait_until_idle(cluster)
    status = json.loads(devcluster("status", "--json").stdout)

    assert (status["name"], status["phase"], status["controller"]) == (NAME, "up", True)
    assert [
        (node["name"], node["power"], node["link"], node["slurmd"], node["slurm_state"])
        for node in status["nodes"]
    ] == [(f"n{number}", "on", "up", True, "idle") for number in range(1, 5)]
    assert devcluster("env").stdout == f"export SLURM_CONF=/var/lib/nvrx-devcluster/{NAME}/etc/slurm.conf\n"
    assert "10.77." in devcluster("status").stdout or "198.18." in devcluster("status").stdout


def test_nodes_hand_out_gpus_to_a_job(cluster: DevCluster, shared: Path) -> None:
    script = f"srun sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES >> {shared}/out'"
    slurm(
        cluster,
        *("sbatch", "--wait", "-N2", "--gres=gpu:2", "--ntasks-per-node=1", "-o", f"{shared}/log"),
        *("--wrap", script),
    )
    assert sorted((shared / "out").read_text().splitlines()) == ["n1 0,1", "n2 0,1"]


def test_exec_runs_inside_the_node(cluster: DevCluster, shared: Path) -> None:
    script = "hostname; ps -e -o pid= | wc -l; ls /tmp /dev/shm; cat /sys/class/net/eth0/address; pwd"
    done = cluster.exec("n2", ["sh", "-c", script], cwd=shared, capture_output=True, text=True)

    assert done.stderr == ""
    name, processes, *listing, address, directory = done.stdout.splitlines()
    assert name == "n2"
    assert int(processes) < 10
    assert [line for line in listing if line not in ("/tmp:", "/dev/shm:", "")] == []
    assert address.startswith("02:")
    assert directory == str(shared)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_exec_passes_the_exit_code_on(cluster: DevCluster, script: str, code: int) -> None:
    assert devcluster("exec", "n1", "--", "sh", "-c", script).returncode == code


def test_nodes_reach_each_other_and_the_controller_by_name(cluster: DevCluster) -> None:
    for name in ("n1", "n3", "ctl"):
        port = 6817 if name == "ctl" else 6818
        probe = f"import socket; socket.create_connection(({name!r}, {port}), 100)"
        assert cluster.exec("n2", [sys.executable, "-c", probe]).returncode == 0


def test_each_node_has_its_own_tmp_shm_and_local_disk(cluster: DevCluster) -> None:
    mine = f"{NAME}-mine"
    places = tuple(f"{directory}/{mine}" for directory in ("/tmp", "/dev/shm", "/local", "/run/nvrx-node"))
    assert cluster.exec("n1", ["touch", *places]).returncode == 0

    for place in places:
        assert cluster.exec("n2", ["test", "-e", place]).returncode == 1
        assert not Path(place).exists()
    assert (cluster.run_dir_of("n1") / mine).exists()
    assert (cluster.local_dir_of("n1") / mine).exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("kill-node", "n9"), "has no node 'n9': its nodes are n1, n2, n3, n4"),
        (("restore-node", "n1", "--wipe-local"), "node n1 is running: kill it before wiping its local disk"),
        (("up", "--nodes", "0"), "--nodes 0 is out of range: use 1 to 64"),
        (("up", "--share", "/tmp"), "each node has its own; name a directory below it"),
        (("up", "--nics", "3"), "--nics is for simulated hardware: add --hardware"),
        (("up", "--hardware", "--nics", "99"), "--nics 99 is out of range: use 0 to 32"),
        (
            ("inject", "n1", "gpu.0.lost"),
            "have no simulated hardware: start it with nvrx-devcluster up --hardware",
        ),
        (("heal", "n1"), "have no simulated hardware: start it with nvrx-devcluster up --hardware"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    cluster: DevCluster, arguments: tuple[str, ...], sentence: str
) -> None:
    done = devcluster(*arguments)

    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["env", "kill-node", "partition-node", "restore-node", "exec", "inject", "heal"]
)
def test_without_a_cluster_every_command_says_how_to_start_one(command: str) -> None:
    arguments = {"env": (), "exec": ("1", "true"), "inject": ("1", "gpu.0.lost")}.get(command, ("1",))
    done = devcluster(command, *arguments, name="absent")

    assert done.returncode == 2
    assert done.stderr == (
        "Error: cluster 'absent' is not up: start it with nvrx-devcluster up --name absent\n"
    )
    assert not (state.BASE / "absent.lock").exists()


def test_other_users_can_submit_but_not_take_it_down(cluster: DevCluster) -> None:
    def as_nobody(*argv: str) -> subprocess.CompletedProcess[str]:
        user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        return subprocess.run(
            [*user, *argv],
            env={"PATH": os.environ["PATH"], **cluster.environment()},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    if as_nobody(sys.executable, "-c", "import nvrx_slurm").returncode != 0:
        pytest.skip("user 65534 cannot run this interpreter")
    assert as_nobody("srun", "-N2", "id", "-u").stdout.split() == ["65534", "65534"]
    done = as_nobody(COMMAND, "down", "--name", NAME)
    assert (done.returncode, "needs root" in done.stderr) == (2, True)


def test_a_killed_node_falls_silent_and_is_gone(healthy: DevCluster) -> None:
    peer_script = (
        "import socket; s = socket.create_server(('', 5000), reuse_port=True); print('up', flush=True)\n"
        "c, _ = s.accept(); c.recv(1)"
    )
    here_script = (
        "import socket; s = socket.create_connection(('n2', 5000)); print('connected', flush=True); "
        "s.settimeout(2)\n"
        "try: print('closed', s.recv(1))\n"
        "except TimeoutError: print('silence')\n"
        "except OSError as error: print('reset', error)"
    )
    inside = [COMMAND, "exec", "--name", NAME]
    mark = f"{os.getpid()}.25"
    slurm(healthy, "sbatch", "-w", "n2", "-o", "/dev/null", "--wrap", f"exec sleep {mark}")
    wait_for("the job's process", lambda: count(mark) == 1)
    with subprocess.Popen([*inside, "n2", sys.executable, "-c", peer_script], stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"up\n"
        with subprocess.Popen(
            [*inside, "n1", sys.executable, "-c", here_script], stdout=subprocess.PIPE
        ) as here:
            assert here.stdout is not None
            assert here.stdout.readline() == b"connected\n"
            healthy.kill_node("n2")

            assert count(mark) == 0
            assert here.stdout.read() == b"silence\n"
        assert peer.wait(100) != 0
    status = healthy.status()
    assert status is not None
    assert (status.nodes[1].power, status.nodes[1].link) == (Power.OFF, Link.CUT)
    done = devcluster("exec", "n2", "true")
    assert (done.returncode, "node n2 is switched off" in done.stderr) == (2, True)


def test_a_node_that_is_back_before_slurm_missed_it_has_lost_its_jobs(healthy: DevCluster) -> None:
    slurm(healthy, "sbatch", "-w", "n2", "-o", "/dev/null", "--wrap", "exec sleep 3600")
    wait_for("the job runs", lambda: slurm(healthy, "squeue", "-h", "-o", "%T") == "RUNNING\n")

    healthy.kill_node("n2")
    healthy.restore_node("n2")

    wait_for("the job waits again", lambda: slurm(healthy, "squeue", "-h", "-o", "%T") == "PENDING\n")


def test_slurm_sees_lost_nodes_down_and_gets_them_back(healthy: DevCluster) -> None:
    keep = ("/local/kept", "/run/nvrx-node/kept", "/tmp/lost", "/dev/shm/lost")
    healthy.exec("n2", ["touch", *keep])
    sleeper = subprocess.Popen([COMMAND, "exec", "--name", NAME, "n3", "sleep", f"{os.getpid()}.75"])
    wait_for("the sleeper", lambda: count(f"{os.getpid()}.75") == 1)
    healthy.kill_node("2")
    healthy.partition_node("n3")

    assert count(f"{os.getpid()}.75") == 1, "a partition leaves the processes alone"
    probe = "import socket; socket.create_connection(('n1', 6818), 1)"
    assert healthy.exec("n3", [sys.executable, "-c", probe], stderr=subprocess.DEVNULL).returncode == 1

    def both_down() -> bool:
        states = slurm(healthy, "sinfo", "-h", "-N", "-n", "n2,n3", "-o", "%T").split()
        return states == ["down*", "down*"]

    wait_for("n2 and n3 are DOWN in Slurm", both_down)
    healthy.restore_node("n3")
    healthy.restore_node("n2")

    assert count(f"{os.getpid()}.75") == 1
    sleeper.kill()
    assert healthy.exec("n3", ["pkill", "-x", "sleep"]).returncode == 0
    sleeper.wait(100)
    found = healthy.exec("n2", ["ls", *keep], capture_output=True, text=True).stdout.split()
    assert found == ["/local/kept", "/run/nvrx-node/kept"]
    assert sorted(slurm(healthy, "srun", "-N4", "hostname").split()) == ["n1", "n2", "n3", "n4"]


def test_a_wiped_node_comes_back_with_an_empty_local_disk(healthy: DevCluster) -> None:
    healthy.exec("n4", ["touch", "/local/old"])
    healthy.kill_node("n4")
    assert devcluster("restore-node", "n4", "--wipe-local").returncode == 0

    assert healthy.exec("n4", ["ls", "-A", "/local"], capture_output=True).stdout == b""
    assert slurm(healthy, "srun", "-N1", "-w", "n4", "hostname") == "n4\n"


def test_a_drained_node_stays_drained(healthy: DevCluster) -> None:
    slurm(healthy, "scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=under test")
    healthy.restore_node("n1")

    status = healthy.status()
    assert status is not None
    assert (status.nodes[0].slurm_state, status.nodes[0].reason) == ("idle+drain", "under test")
    slurm(healthy, "scontrol", "update", "NodeName=n1", "State=RESUME")


def test_up_restores_nodes_that_were_lost(healthy: DevCluster) -> None:
    healthy.kill_node("n1")
    assert devcluster("up").returncode == 0
    wait_until_idle(healthy)

    status = healthy.status()
    assert status is not None
    assert status.phase is Phase.UP
    assert all(node.power is Power.ON and node.slurm_state == "idle" for node in status.nodes)


def test_nodes_see_a_directory_below_tmp_that_is_shared(other_name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("shared")
    other = DevCluster(other_name)
    other.up(nodes=1, gpus_per_node=0, share=[tmp_path])

    assert other.exec("n1", ["cat", str(tmp_path / "file")], capture_output=True).stdout == b"shared"
    with pytest.raises(DevClusterError, match="its nodes do not see"):
        other.up(nodes=1, gpus_per_node=0, share=[tmp_path.parent])


def test_exec_stays_inside_the_node_where_the_whole_machine_is_a_chroot(other_name: str) -> None:
    root = tempfile.mkdtemp(dir="/var/tmp")
    up = f"{COMMAND} up --name {other_name} --nodes 1 --gpus-per-node 0"
    inside = f"{COMMAND} exec --name {other_name} 1 -- sh -c 'hostname; ls -d /local; ls -A /tmp'"
    script = f"mount --rbind / {root} && exec chroot {root} sh -c {shlex.quote(f'{up} >&2 && {inside}')}"
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        os.rmdir(root)  # never recursively: the machine's own root was mounted here
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["n1", "/local"]
