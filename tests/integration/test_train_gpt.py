"""The example trains, survives being killed at any step, and its loss curve does not show it.

The ranks are real processes. In place of the client for nvrx-srun they import a stand-in that writes
down what the script calls, and on request asks for a stop or kills its own process at a given step.
"""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "train_gpt.py"
TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--batch", "2", "--block", "16"]
OPTIONS = [*TINY, "--steps", "16", "--ckpt-every", "5"]
PATIENCE_S = 240

sys.path.insert(0, str(SCRIPT.parent))
from gpt import checkpoints  # noqa: E402
from gpt.losses import LossesDiffer, LossFile, read_losses  # noqa: E402

STAND_IN = """
import os, signal

class RankMonitorClient:
    def __init__(self):
        self.rank, self.step = os.environ.get("RANK", "0"), 0

    def _now(self, variable):
        return os.environ.get(variable) == f"{self.rank}:{self.step}"

    def _log(self, call):
        if folder := os.environ.get("TEST_CALLS"):
            with open(f"{folder}/calls_{self.rank}", "a") as file:
                file.write(call + "\\n")

    def init_workload_monitoring(self): self._log("init")
    def shutdown_workload_monitoring(self): self._log("shutdown")
    def report_checkpoint_loaded(self, step): self._log(f"loaded {step}")
    def report_checkpoint_saved(self, step): self._log(f"saved {step}")
    def should_stop(self): return self._now("TEST_STOP")

    def send_heartbeat(self, *, step=None):
        self.step = step
        if self._now("TEST_KILL"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stand_in")
    package = root / "nvrx_slurm" / "fault_tolerance"
    package.mkdir(parents=True)
    (root / "nvrx_slurm" / "__init__.py").touch()
    (package / "__init__.py").write_text(STAND_IN)
    return root


class Runner:
    """Starts ranks, waits for all of them, and leaves none behind."""

    def __init__(self, stand_in: Path) -> None:
        self._stand_in = stand_in

    def run(
        self, out: Path, *arguments: str, world_size: int = 2, **environment: str
    ) -> list[tuple[int, str]]:
        """The exit code and output of each rank. Once one rank is dead, those that wait for it are killed."""
        # The ranks meet on a store of ours, as they do on the Coordinator's: no port to guess. A new one for
        # each run, since the ranks put no attempt number before the keys that they leave in it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes = []
        try:
            for rank in range(world_size):
                ranked = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    self.start([str(SCRIPT), "--out", str(out), *arguments], ranked | environment)
                )
            outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            env=clean_environment() | {"PYTHONPATH": str(self._stand_in)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def clean_environment() -> dict[str, str]:
    """This process's environment without what a launcher may have left in it."""
    launchers = ("NVRX_", "TORCHELASTIC_", "SLURM_", "MASTER_", "TEST_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(launchers)}


@pytest.fixture(scope="module")
def runner(stand_in: Path) -> Runner:
    return Runner(stand_in)


@pytest.fixture(scope="module")
def finished(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nothing disturbs has written."""
    out = tmp_path_factory.mktemp("undisturbed")
    for code, output in runner.run(out, *OPTIONS):
        assert code == 0, output
    return out


@pytest.fixture(scope="module")
def undisturbed(finished: Path) -> dict[int, float]:
    losses = read_losses(finished / "loss.jsonl")
    assert list(losses) == list(range(1, 17))
    assert losses[16] < losses[1]
    return losses


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def calls(folder: Path, rank: int) -> list[str]:
    return (folder / f"calls_{rank}").read_text().splitlines()


def saved_steps(out: Path) -> list[int]:
    return [int(path.stem.removeprefix("step_")) for path in sorted(out.glob("step_*.pt"))]


def test_a_run_with_a_killed_rank_has_the_loss_curve_of_an_undisturbed_one(
    runner: Runner, undisturbed: dict[int, float], out: Path, tmp_path: Path
) -> None:
    (killed, survivor_output), (rank_1, _) = runner.run(out, *OPTIONS, TEST_KILL="1:13")
    assert rank_1 == -9
    assert killed != 0, survivor_output
    assert saved_steps(out) == [5, 10]

    (code, output), (rank_1, _) = runner.run(out, *OPTIONS, TEST_CALLS=str(tmp_path))

    assert (code, rank_1) == (0, 0), output
    assert "resumed from step 10" in output
    assert read_losses(out / "loss.jsonl") == undisturbed  # repeats were equal, too: read_losses checks
    assert len((out / "loss.jsonl").read_text().splitlines()) > 16
    assert calls(tmp_path, 0) == ["init", "loaded 10", "saved 15", "saved 16", "shutdown"]
    assert calls(tmp_path, 1) == ["init", "shutdown"]


def test_when_one_rank_is_asked_to_stop_all_save_and_leave_at_the_same_step(
    runner: Runner, undisturbed: dict[int, float], out: Path
) -> None:
    (code, output), (rank_1, _) = runner.run(out, *OPTIONS, TEST_STOP="1:7")
    assert (code, rank_1) == (0, 0), output
    assert "stopped as asked, checkpoint saved at step 8/16" in output
    assert saved_steps(out) == [5, 8]

    (code, output), _ = runner.run(out, *OPTIONS)
    assert code == 0, output
    assert "resumed from step 8" in output
    assert read_losses(out / "loss.jsonl") == undisturbed


def test_a_torn_newest_checkpoint_is_skipped_for_the_one_before(
    runner: Runner, finished: Path, undisturbed: dict[int, float], out: Path
) -> None:
    shutil.copytree(finished, out)
    newest = out / "step_00000016.pt"
    os.truncate(newest, newest.stat().st_size // 2)

    (code, output), _ = runner.run(out, *OPTIONS)

    assert code == 0, output
    assert f"skipping checkpoint {newest}: its content does not match its digest" in output
    assert "resumed from step 15" in output
    assert read_losses(out / "loss.jsonl") == undisturbed


def test_it_runs_as_one_plain_process(runner: Runner, tmp_path: Path) -> None:
    process = runner.start([str(SCRIPT), "--steps", "2", *TINY], {"NVRX_RUN_DIR": str(tmp_path)})
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert list(read_losses(tmp_path / "train" / "loss.jsonl")) == [1, 2]


def test_it_runs_under_torchrun_and_refuses_other_settings_on_resume(runner: Runner, out: Path) -> None:
    def torchrun(*arguments: str) -> tuple[int, str]:
        # An address of ours: torchrun's own guess waits in vain where the host's name does not resolve.
        launcher = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        script = [str(SCRIPT), "--out", str(out), "--steps", "2", *TINY, *arguments]
        process = runner.start(["-m", "torch.distributed.run", *launcher, *script], {})
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.terminate()  # torchrun ends its ranks
            process.wait(timeout=PATIENCE_S)
        return process.returncode, output

    code, output = torchrun()
    assert code == 0, output
    assert list(read_losses(out / "loss.jsonl")) == [1, 2]

    code, output = torchrun("--seed", "7")
    assert code != 0
    assert "use the same settings, or another --out" in output


def test_a_checkpoint_is_for_its_owner_only_and_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, step, {"step": step})
    assert saved_steps(tmp_path) == [2, 3]
    assert stat.S_IMODE((tmp_path / "step_00000003.pt").stat().st_mode) == 0o600
    assert checkpoints.load_newest(tmp_path) == (3, {"step": 3})


def test_a_failed_write_leaves_nothing_and_the_checkpoint_before_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(tmp_path, 1, {"step": 1})

    def disk_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(tmp_path, 2, {"step": 2})

    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 1, {"step": 1})
    (tmp_path / ".step_00000002.pt.x1y2z3").write_bytes(b"half")
    assert checkpoints.load_newest(tmp_path) == (1, {"step": 1})
    checkpoints.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.pt"]


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100])
def test_a_file_that_is_no_checkpoint_is_skipped(tmp_path: Path, content: bytes) -> None:
    checkpoints.path_of(tmp_path, 5).write_bytes(content)
    assert checkpoints.load_newest(tmp_path) is None


def test_one_flipped_bit_makes_a_checkpoint_unreadable(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, 1, {"step": 1})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(checkpoints.Unreadable):
        checkpoints.load(path)


def test_a_line_that_a_dying_node_cut_short_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    losses = LossFile(path)
    losses.append(2, 0.1 + 0.2)
    losses.close()
    assert read_losses(path) == {1: 0.5, 2: 0.1 + 0.2}


def test_a_repeated_step_with_another_loss_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 1, "loss": 0.5000000000000001}\n')
    with pytest.raises(LossesDiffer, match="step 1 of"):
        read_losses(path)


class TestAsync:
    """With the package itself in place of the stand-in: outside nvrx-srun its client does nothing."""

    def train(self, out: Path, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--out", str(out), *TINY, "--ckpt-every", "5", *arguments],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return done.stdout

    def test_written_in_the_background_a_checkpoint_resumes_the_same_loss_curve(self, tmp_path: Path) -> None:
        self.train(tmp_path / "once", "--steps", "16")
        self.train(tmp_path / "twice", "--steps", "12", "--ckpt", "async")
        # as if it had been killed at the twelfth step, before that was on disk
        (tmp_path / "twice" / "async_step_00000012.pt").unlink()
        output = self.train(tmp_path / "twice", "--steps", "16", "--ckpt", "async")
        assert "resumed from step 10" in output
        assert read_losses(tmp_path / "twice" / "loss.jsonl") == read_losses(tmp_path / "once" / "loss.jsonl")
        kept = sorted(path.name for path in (tmp_path / "twice").glob("*.pt"))
        assert kept == ["async_step_00000015.pt", "async_step_00000016.pt"]
