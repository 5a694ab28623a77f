"""The command ``nvrx-attribute``: reports, documents, bundles and exit codes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from fr_world import World, tensor_and_data_parallel

from nvrx_slurm.attribution import bundle as bundle_module
from nvrx_slurm.attribution.attribute import attribute
from nvrx_slurm.attribution.bundle import write_bundle
from nvrx_slurm.attribution.evidence import CycleEvidence
from nvrx_slurm.attribution.logs.finding import Source
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.journal import (
    CycleStarted,
    FaultDetected,
    FaultKind,
    FirstStep,
    JobStarted,
    JournalWriter,
    Progress,
    RankReady,
    WorkersStarted,
)

PYTHON = [sys.executable, "-c", "from nvrx_slurm.cli.attribute import main; main(prog_name='nvrx-attribute')"]
ENVIRON = {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", "TZ": "UTC", "COLUMNS": "100"}
LOG = """\
 iteration 12/ 500 | consumed samples: 256 | lm loss: 2.0E+00 |
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/u/train.py", line 88, in next_batch
[rank3]: ValueError: bad sample 17
[rank5]: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:15254
using token=hf_abcdefghijklmnopqrstuvwxyz for user a.person@example.org
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [*PYTHON, *map(str, arguments)]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=250, env=ENVIRON, check=False, input=stdin
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job.log"
    path.write_text(LOG)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A job of two nodes: rank 3 got a signal in cycle 1."""
    path = tmp_path / "run"
    (path / "cycles" / "1").mkdir(parents=True)
    writer = JournalWriter(path / "journal.jsonl", "4711", 0)
    writer.append(
        0,
        JobStarted(
            nodes=["n0", "n1"],
            active_nodes=2,
            spares=0,
            max_restarts=3,
            argv=["t.py"],
            host="n0",
            fence="",
            version="",
        ),
    )
    for cycle in (0, 1):
        writer.append(cycle, CycleStarted(world_size=4, nodes=["n0", "n1"], spares=[]))
        for node in (0, 1):
            ranks = [2 * node, 2 * node + 1]
            writer.append(cycle, WorkersStarted(node=f"n{node}", ranks=ranks, pids=[7, 8], warm=True))
        writer.append(cycle, RankReady(ranks=4))
        writer.append(cycle, FirstStep(ranks=4, step=1))
    writer.append(1, Progress(step=40))
    writer.append(
        1, FaultDetected(kind=FaultKind.SIGNAL, node="n1", detector="child", rank=3, signal="SIGSEGV")
    )
    writer.close()
    merged = "2026-11-30T10:00:00.000 n0 rank 1: RuntimeError: [gloo/pair.cc] Connection closed by peer\n"
    (path / "cycles" / "1" / "merged.log").write_text(merged)
    return path


class TestLog:
    def test_the_first_three_lines_say_cause_culprit_and_what_is_next(self, log: Path) -> None:
        done = run("log", log)
        assert (done.returncode, done.stderr) == (0, "")
        first, culprit, following = done.stdout.splitlines()[:3]
        assert first.startswith("first cause the program raised an exception")
        assert "rank 3" in culprit
        assert following.startswith("next        restart")
        assert f"{log}:4" in done.stdout
        assert "train.py:next_batch" in done.stdout

    def test_json_is_one_document(self, log: Path) -> None:
        done = run("log", log, "--json")
        found = json.loads(done.stdout)
        assert (found["schema"], found["primary"]["category"]) == ("attribution.v1", "code.exception")

    def test_a_log_without_a_failure_is_inconclusive(self, tmp_path: Path) -> None:
        (tmp_path / "a.log").write_text("all is well\n")
        assert run("log", tmp_path / "a.log").returncode == 3

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["log", "/none.log"], "/none.log"),
            (["log", "LOG", "--kernel-log", "x"], "NODE=FILE"),
            (["log", "LOG", "--rules", "/none.yaml"], "none.yaml"),
            (["log", "LOG", "--policy", "/none.yaml"], "none.yaml"),
            (["log", "LOG", "--bundle", "x.zip"], "tar.zst"),
            (["fr", "/none"], "no directory"),
            (["fr", "."], "no usable dump"),
            (["job", "/none"], "does not exist"),
            (["rules", "explain", "gpu.nothing"], "gpu.off_bus"),
        ],
    )
    def test_wrong_input_gets_one_sentence(self, arguments: list[str], says: str, log: Path) -> None:
        done = run(*[str(log) if argument == "LOG" else argument for argument in arguments])
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_kernel_log_excludes_its_node(self, log: Path, tmp_path: Path) -> None:
        (tmp_path / "kern").write_text("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.\n")
        found = json.loads(run("log", log, "--kernel-log", f"n7={tmp_path / 'kern'}", "--json").stdout)
        assert found["decision"]["exclude"] == ["n7"]

    def test_follow_tells_each_change_and_reports_at_ctrl_c(self, log: Path) -> None:
        argv = [*PYTHON, "log", str(log), "--follow"]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=ENVIRON)
        try:
            assert process.stdout is not None
            assert "code.exception" in process.stdout.readline()
            with log.open("a") as file:
                file.write("[rank2]: torch.OutOfMemoryError: CUDA out of memory.\n")
            assert "mem.cuda_oom" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=250)
            assert rest.startswith("first cause GPU memory ran out")
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()


class TestJob:
    def test_the_journal_tells_who_and_where(self, run_dir: Path) -> None:
        found = json.loads(run("job", run_dir, "--json").stdout)
        assert (found["job"], found["cycle"], found["primary"]["category"]) == ("4711", 1, "host.segfault")
        assert [(c["id"], c["node"]) for c in found["culprits"]] == [("3", "n1")]
        assert found["progress"]["last_completed_step"] == 40

    def test_recorded_verdicts_count_in_the_next_one_only(self, run_dir: Path) -> None:
        for _ in range(2):
            found = json.loads(run("job", run_dir, "--record", "--json").stdout)
            assert found["decision"]["same_root_no_advance"] == 0
        assert len((run_dir / "attribution.jsonl").read_text().splitlines()) == 2

    def test_a_cycle_that_is_not_there_is_refused(self, run_dir: Path) -> None:
        done = run("job", run_dir, "--cycle", "9")
        assert (done.returncode, "cycles 0 to 1" in done.stderr) == (2, True)


class TestFlightRecorder:
    def test_the_rank_that_all_wait_for_is_named(self, tmp_path: Path) -> None:
        World(tensor_and_data_parallel(8, 4, 5), {3: 9}).write(tmp_path / "dumps")
        done = run("fr", tmp_path / "dumps")
        assert done.returncode == 0
        assert done.stdout.splitlines()[0].startswith("culprit     rank 3: host-lag")
        assert json.loads(run("fr", tmp_path / "dumps", "--json").stdout)["schema"] == "fr.v1"

    def test_suspicions_alone_are_inconclusive(self, tmp_path: Path) -> None:
        World(tensor_and_data_parallel(8, 4, 5), {3: 9}).write(tmp_path / "dumps")
        (tmp_path / "dumps" / "_dump_3").unlink()
        assert run("fr", tmp_path / "dumps", "--world-size", "8").returncode == 3


class TestRules:
    def test_they_are_listed_and_explained(self) -> None:
        listed = json.loads(run("rules", "list", "--json").stdout)
        assert {"gpu.off_bus", "code.exception"} <= {family["family"] for family in listed}
        assert "fallen off the bus" in run("rules", "explain", "gpu.off_bus").stdout

    def test_lines_are_classified(self, tmp_path: Path) -> None:
        done = run("rules", "test", "CUDA error: misaligned address", "all is well")
        assert done.returncode == 3
        assert done.stdout.split()[0] == "cuda.illegal_access"
        assert run("rules", "test", stdin="ValueError: x\n").stdout.split()[0] == "code.exception"

    def test_labelled_lines_are_compared(self, tmp_path: Path) -> None:
        cases = [
            {"line": "ValueError: x", "category": "code.exception"},
            {"line": "KeyError: x", "category": "code.import"},
        ]
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        done = run("rules", "test", "--labelled", tmp_path / "cases.json")
        assert (done.returncode, "1 of 2 lines right" in done.stdout) == (3, True)


class TestBundle:
    def members(self, path: Path) -> dict[str, str]:
        with tarfile.open(path) as archive:
            return {m.name: (archive.extractfile(m) or pytest.fail(m.name)).read().decode() for m in archive}

    def test_it_holds_verdict_and_lines_and_no_secret(self, log: Path, tmp_path: Path) -> None:
        done = run("log", log, "--bundle", tmp_path / "out.tar.gz")
        assert "evidence is in" in done.stderr
        members = self.members(tmp_path / "out.tar.gz")
        assert set(members) == {
            f"nvrx-attribution/{n}" for n in ("verdict.json", "report.txt", "logs/0_job.log")
        }
        text = "".join(members.values())
        assert "bad sample 17" in text
        assert "hf_abc" not in text
        assert "example.org" not in text
        assert (tmp_path / "out.tar.gz").stat().st_mode & 0o777 == 0o600

    def test_without_zstandard_it_is_gzip_and_says_so(
        self, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bundle_module, "_have_zstandard", lambda: False)
        result = attribute(CycleEvidence(logs=(Source(log),)), load_rules())
        written = write_bundle(result, tmp_path / "out.tar.zst")
        assert written.path == tmp_path / "out.tar.gz"
        assert "zstandard is not installed" in written.say()
        assert self.members(written.path)

    def test_with_it_it_is_zstd(self, log: Path, tmp_path: Path) -> None:
        zstandard = pytest.importorskip(
            "zstandard", reason="zstandard, of the extra bundle, is not installed"
        )
        result = attribute(CycleEvidence(logs=(Source(log),)), load_rules())
        written = write_bundle(result, tmp_path / "out.tar.zst")
        with written.path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            (tmp_path / "out.tar").write_bytes(stream.read())
        assert "nvrx-attribution/verdict.json" in self.members(tmp_path / "out.tar")


def test_the_help_starts_in_no_time_and_without_torch() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *PYTHON[1:], "--help"],
        capture_output=True, text=True, timeout=250, env={**ENVIRON, "PATH": os.environ["PATH"]}, check=True,
    )  # fmt: skip
    assert time.monotonic() - began < 30
    names = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not names & {"torch", "numpy", "grpc", "yaml", "rich"}


SLURMCTLD = """\
[2026-12-01T12:43:10.100] error: Could not open job state file /var/spool/job_state: No such file or directory
[2026-12-01T12:43:19.213] error: Prolog launch failure, JobId=2
[2026-12-01T12:43:19.239] error: validate_node_specs: Prolog or job env setup failure on node n6, draining
[2026-12-01T12:44:48.337] Time limit exhausted for JobId=6
[2026-12-01T13:44:48.337] error: validate_node_specs: Prolog or job env setup failure on node n9, draining
"""


@pytest.mark.parametrize(
    ("job", "category", "exclude"),
    [("2", "slurm.prolog_failed", ["n6"]), ("6", "slurm.time_limit", []), ("12", None, [])],
)
def test_of_slurmctlds_log_only_one_jobs_lines_and_what_they_go_with_count(
    tmp_path: Path, job: str, category: str | None, exclude: list[str]
) -> None:
    log = tmp_path / "slurmctld.log"
    log.write_text(SLURMCTLD)
    done = run("log", "--slurm-log", log, "--job", job, "--json")
    said = json.loads(done.stdout)
    assert (said["primary"] and said["primary"]["category"]) == category
    assert said["decision"]["exclude"] == exclude


class TestOddInput:
    """Nothing hangs, nothing ends in a traceback, and what is refused is said in one sentence."""

    def refused(self, *arguments: str | Path, says: str) -> None:
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("nvrx-attribute: ")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr

    def test_a_pipe_that_nobody_writes_is_an_empty_log(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        assert run("log", tmp_path / "fifo").returncode == 3

    def test_a_shells_pipe_is_read_to_its_end(self, log: Path) -> None:
        with subprocess.Popen(["cat", str(log)], stdout=subprocess.PIPE) as cat:
            assert cat.stdout is not None
            fd = cat.stdout.fileno()
            argv = [*PYTHON, "log", f"/dev/fd/{fd}"]
            done = subprocess.run(
                argv, capture_output=True, env=ENVIRON, timeout=250, check=False, pass_fds=[fd]
            )
        assert (done.returncode, b"raised an exception" in done.stdout) == (0, True)

    def test_what_is_neither_a_file_nor_a_pipe_is_refused(self, log: Path, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        self.refused("log", "/dev/zero", says="neither a file nor a pipe")
        self.refused("log", tmp_path, says="Is a directory")
        self.refused("log", log, tmp_path / "fifo", "--follow", says="a pipe is read without --follow")
        self.refused("log", says="nothing to read")

    @pytest.mark.parametrize("option", ["--policy", "--rules", "--explain"])
    def test_a_binary_configuration_is_refused(self, log: Path, tmp_path: Path, option: str) -> None:
        (tmp_path / "binary").write_bytes(b"\x80\x00\xff" * 100)
        self.refused("log", log, option, tmp_path / "binary", says="UTF-8 is expected, and byte 0 is none")

    @pytest.mark.parametrize("option", ["--policy", "--rules", "--explain"])
    def test_no_configuration_is_waited_for_or_read_without_end(
        self, log: Path, tmp_path: Path, option: str
    ) -> None:
        os.mkfifo(tmp_path / "fifo")
        # Nobody writes it: it is empty, and nothing has to be said in a policy.
        if option == "--policy":
            assert run("log", log, option, tmp_path / "fifo").returncode == 0
        else:
            self.refused("log", log, option, tmp_path / "fifo", says="xpected")
        self.refused("log", log, option, "/dev/zero", says="neither a file nor a pipe")
        self.refused("log", log, option, tmp_path, says="Is a directory")
        (tmp_path / "large").write_text("x" * (2**20 + 1))
        self.refused("log", log, option, tmp_path / "large", says="larger than 1 MiB")
        (tmp_path / "deep").write_text("[" * 100_000)
        self.refused("log", log, option, tmp_path / "deep", says="no YAML")

    def test_an_answer_that_does_not_fit_on_the_disk_is_told(self, log: Path) -> None:
        argv = [*PYTHON, "log", log, "--json"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                argv, stdout=full, stderr=subprocess.PIPE, env=ENVIRON, timeout=60, check=False
            )
        said = "nvrx-attribute: the answer cannot be written: No space left on device\n"
        assert (done.returncode, done.stderr.decode()) == (2, said)

    def test_labelled_lines_are_not_waited_for_and_may_be_hostile(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "deep").write_text("[" * 200_000)
        for name in ("fifo", "deep"):
            self.refused("rules", "test", "--labelled", tmp_path / name, says="a JSON list of objects")

    @pytest.mark.parametrize(
        ("begin", "says"),
        [
            (gzip.compress(b"x"), "it is compressed: give it as <(zcat "),
            (b"\x28\xb5\x2f\xfd", "<(zstdcat "),
            ("Error".encode("utf-16"), "it is UTF-16"),
        ],
    )
    def test_a_log_that_is_no_text_yet_is_refused(self, tmp_path: Path, begin: bytes, says: str) -> None:
        (tmp_path / "log").write_bytes(begin)
        self.refused("log", tmp_path / "log", says=says)

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("bounded_retries: -1", "bounded_retries"),
            ("on_time_limit: sometimes", "on_time_limit"),
            ("backoff_s: .nan", "backoff_s"),
            ("jitter: 3", "jitter"),
            ("- 1", "object"),
        ],
    )
    def test_a_policy_that_makes_no_sense_is_refused(
        self, log: Path, tmp_path: Path, line: str, says: str
    ) -> None:
        (tmp_path / "policy.yaml").write_text(line)
        self.refused("log", log, "--policy", tmp_path / "policy.yaml", says=says)

    def test_a_run_directory_without_a_cycle_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "journal.jsonl").write_text("")
        self.refused("job", tmp_path, says="the journal has no cycle yet")

    def test_a_log_that_is_a_link_out_of_its_run_directory_is_not_read(
        self, tmp_path: Path, log: Path
    ) -> None:
        run_dir = tmp_path / "run"
        (run_dir / "cycles" / "0").mkdir(parents=True)
        journal = JournalWriter(run_dir / "journal.jsonl", "7", 0)
        journal.append(0, CycleStarted(world_size=1, nodes=["n1"], spares=[]))
        (run_dir / "cycles/0/merged.log").symlink_to(log)
        done = run("job", run_dir, "--json")
        said = json.loads(done.stdout)
        assert said["coverage"]["bytes_read"] == 0
        assert any("merged.log" in missing for missing in said["coverage"]["missing_sources"])

    def test_a_file_name_that_is_no_utf8_goes_into_a_bundle(self, tmp_path: Path) -> None:
        path = tmp_path / os.fsdecode(b"a\xff.log")
        path.write_text(LOG)
        argv = [*PYTHON, "log", path, "--bundle", tmp_path / "out.tar.gz"]
        done = subprocess.run(argv, capture_output=True, env=ENVIRON, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        with tarfile.open(tmp_path / "out.tar.gz") as archive:
            assert len(archive.getnames()) == 3

    def test_a_world_of_billions_is_refused(self, tmp_path: Path) -> None:
        assert run("fr", tmp_path, "--world-size", "99999999999").returncode == 2

    def test_a_line_does_not_drive_the_terminal(self) -> None:
        assert "\x1b" not in run("rules", "test", "ValueError: \x1b]0;title\x07").stdout
