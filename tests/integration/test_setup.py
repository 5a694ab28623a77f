"""What bin/nvrx-test and bin/nvrx-quickstart decide to install, refuse and redo.

The real shell code runs in a copy of the clone's skeleton; apt-get, dpkg-query, python3, sudo and the like
are stand-ins that note how they were called and behave as files in a state folder say.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 200
TOOLS = (
    "bash sh basename cat chmod chown cp dirname env find flock getent grep head id mkdir mktemp readlink rm"
    " sed setpriv sha256sum stat tail tee test touch true"
)
ALL_PACKAGES = (
    *("slurm-wlm", "slurm-wlm-basic-plugins", "munge", "iproute2", "procps"),
    *("gcc", "g++", "libc6-dev", "python3-dev"),
)

FAKES = {
    "dpkg-query": """
        [ -e "$STATE/installed/$4" ] && echo installed
    """,
    "dpkg": "true",
    "systemctl": "true",
    "apt-get": """
        case " $* " in
        *" update "*) [ ! -e "$STATE/update-fails" ] ;;
        *" install "*)
            [ -e "$POLICY" ] && for service in slurmd munge.service cron; do
                sh "$POLICY" $service start
                echo "policy for $service: $?" >>"$STATE/calls"
            done
            if [ -e "$STATE/apt-says" ]; then cat "$STATE/apt-says" >&2; exit 100; fi
            for word; do touch "$STATE/installed/$word" 2>/dev/null; done ;;
        esac
    """,
    "sudo": """
        [ -e "$STATE/sudo-needs-password" ] && [ "$1" = -n ] && exit 1
        while [ "${1#-}" != "$1" ]; do shift; done
        exec "$@"
    """,
    # Both the machine's python3 and the one in .venv, which is a copy of it.
    "python3": """
        case "$*" in
        *ensurepip*) [ -e "$STATE/installed/python3-venv" ] ;;
        *realpath*) echo /usr/bin/python3 "$(cat "$STATE/version")" ;;
        "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit 0 ;;
        "-m pip "*)
            if [ -e "$STATE/pip-waits" ]; then cat "$STATE/pip-waits"; fi
            if [ -e "$STATE/pip-says" ]; then cat "$STATE/pip-says" >&2; exit 1; fi
            for command in nvrx-srun ruff mypy lint-imports; do
                cp "$0" "${0%/*}/$command"
            done ;;
        *) [ ! -e "$STATE/fails/${0##*/}" ] ;;
        esac
    """,
}

DRIVER = """#!/bin/bash
source "$CLONE/bin/lib/setup.sh"
policy_file=$POLICY
systemd_mark=$STATE/systemd
is_root() { [[ ! -e $STATE/not-root ]]; }
set_up
"""


class Machine:
    """A clone and a machine around it, both made of files."""

    def __init__(self, root: Path) -> None:
        self.clone, self.state, self.fakes = root / "clone", root / "state", root / "fakes"
        self.policy = root / "policy-rc.d"
        self.venv = self.clone / ".venv"
        for folder in (self.clone, self.state / "installed", self.state / "fails", self.fakes):
            folder.mkdir(parents=True)
        shutil.copytree(REPOSITORY / "bin", self.clone / "bin", symlinks=True)
        shutil.copytree(REPOSITORY / "csrc" / "cupti", self.clone / "csrc" / "cupti")
        for name in ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.clone)
        self.driver = root / "nvrx-test"
        self.driver.write_text(DRIVER)
        for tool in TOOLS.split():
            real = shutil.which(tool)
            assert real, f"this machine has no {tool}"
            (self.fakes / tool).symlink_to(real)
        for name, body in FAKES.items():
            self.fake(name, body)
        self.set("version", "3.11.2")
        self.install(*ALL_PACKAGES, "python3-venv")

    def fake(self, name: str, body: str) -> None:
        path = self.fakes / name
        path.write_text(f'#!/bin/sh\necho "${{0##*/}} $*" >>"$STATE/calls"\n{body}\n')
        path.chmod(0o755)

    def remove(self, *tools: str) -> None:
        for tool in tools:
            (self.fakes / tool).unlink()

    def set(self, name: str, content: str = "") -> None:
        (self.state / name).write_text(content)

    def unset(self, name: str) -> None:
        (self.state / name).unlink()

    def install(self, *packages: str) -> None:
        for package in packages:
            self.set(f"installed/{package}")

    def uninstall(self, *packages: str) -> None:
        for package in packages:
            self.unset(f"installed/{package}")

    def start(self, command: Path | None = None, *arguments: str) -> subprocess.Popen[str]:
        places = {"STATE": self.state, "CLONE": self.clone, "POLICY": self.policy, "PATH": self.fakes}
        return subprocess.Popen(
            ["bash", str(command or self.driver), *arguments],
            env={name: str(path) for name, path in places.items()} | {"HOME": str(self.state)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: Path | None = None, *arguments: str) -> tuple[int, str]:
        """Exit code and output; `calls()` then tells of this run only."""
        (self.state / "calls").write_text("")
        process = self.start(command, *arguments)
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            kill_group(process)
        return process.returncode, output

    def calls(self, start: str) -> list[str]:
        return [line for line in (self.state / "calls").read_text().splitlines() if line.startswith(start)]


def kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def one_sentence(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("nvrx-test: ")]
    return lines[-1]


class TestWhatIsMissing:
    def test_is_installed_and_nothing_else(self, machine: Machine) -> None:
        machine.uninstall("munge", "slurm-wlm")
        assert machine.run()[0] == 0
        (install,) = [c for c in machine.calls("apt-get") if " install " in c]
        assert install.endswith("install -y --no-install-recommends slurm-wlm munge")
        assert len([c for c in machine.calls("apt-get") if c.endswith(" update")]) == 1
        assert machine.calls("python3 -m venv") == [f"python3 -m venv {machine.venv}"]
        assert machine.calls("python -m pip")[0].endswith("-c constraints.txt -e .[dev]")

    def test_is_nothing_on_the_second_run(self, machine: Machine) -> None:
        machine.run()
        code, output = machine.run()
        assert (code, output) == (0, "")
        for command in ("apt-get", "sudo", "python3", "python -m"):
            assert machine.calls(command) == []

    def test_includes_debians_venv_package_only_if_no_python_can_do_without(self, machine: Machine) -> None:
        machine.uninstall("python3-venv")
        assert machine.run()[0] == 0
        assert [c for c in machine.calls("apt-get") if c.endswith(" python3 python3-venv")]
        assert machine.venv.is_dir()

    def test_is_found_even_if_some_package_source_is_broken(self, machine: Machine) -> None:
        machine.uninstall("munge")
        machine.set("update-fails")
        assert machine.run()[0] == 0

    def test_is_found_in_an_older_pythons_place(self, machine: Machine) -> None:
        """The python3 on PATH is too old or cannot make a .venv, another one can."""
        machine.fake("python3.12", FAKES["python3"])
        machine.fake("python3", "false")
        assert machine.run()[0] == 0
        assert machine.calls("python3.12 -m venv")
        assert machine.calls("apt-get") == []


class TestServices:
    def test_of_the_packages_are_not_started_and_others_are(self, machine: Machine) -> None:
        machine.uninstall("munge")
        machine.run()
        assert machine.calls("policy") == [
            "policy for slurmd: 101",
            "policy for munge.service: 101",
            "policy for cron: 0",
        ]
        assert not machine.policy.exists()

    def test_policy_of_the_administrator_is_left_alone(self, machine: Machine) -> None:
        machine.uninstall("munge")
        machine.policy.write_text("#!/bin/sh\nexit 101\n")
        machine.run()
        assert machine.policy.read_text() == "#!/bin/sh\nexit 101\n"

    def test_policy_of_a_killed_set_up_forbids_nothing_and_is_replaced(self, machine: Machine) -> None:
        gone = subprocess.Popen(["true"])
        gone.wait()
        machine.policy.write_text(f"#!/bin/sh\n# nvrx-slurm\nkill -0 {gone.pid} || exit 0\nexit 101\n")
        machine.uninstall("munge")
        machine.run()
        assert machine.calls("policy for slurmd") == ["policy for slurmd: 101"]
        assert not machine.policy.exists()

    def test_policy_goes_also_when_the_installation_fails(self, machine: Machine) -> None:
        machine.uninstall("munge")
        machine.set("apt-says", "E: Unable to locate package munge\n")
        machine.run()
        assert not machine.policy.exists()

    def test_that_were_there_before_stay_enabled(self, machine: Machine) -> None:
        (machine.state / "systemd").mkdir()
        machine.install("slurmd")
        machine.uninstall("munge", "slurm-wlm")
        machine.run()
        assert machine.calls("systemctl") == ["systemctl --quiet disable --now munge slurmctld"]


class TestWithoutRoot:
    def test_sudo_is_used_for_debian_packages_only(self, machine: Machine) -> None:
        machine.set("not-root")
        machine.uninstall("munge")
        assert machine.run()[0] == 0
        assert any("apt-get" in call and "install" in call for call in machine.calls("sudo"))
        assert not any("pip" in call or "venv" in call for call in machine.calls("sudo"))

    def test_and_without_sudo_it_says_to_run_it_as_root(self, machine: Machine) -> None:
        machine.set("not-root")
        machine.remove("sudo")
        code, output = machine.run()
        assert code == 2
        assert output.splitlines() == [one_sentence(output)]
        assert "there is no sudo here: run it as root" in output

    def test_and_without_a_terminal_for_the_password_it_says_so(self, machine: Machine) -> None:
        machine.set("not-root")
        machine.set("sudo-needs-password")
        code, output = machine.run()
        assert code == 2
        assert "sudo has no terminal to ask for a password: run it as root" in output


class TestAFailureSays:
    def test_that_the_package_registry_of_debian_cannot_be_reached(self, machine: Machine) -> None:
        machine.uninstall("munge")
        machine.set("apt-says", "E: Failed to fetch munge.deb  Could not resolve host\n")
        code, output = machine.run()
        assert code == 2
        assert "    E: Failed to fetch munge.deb  Could not resolve host" in output
        assert "Debian packages munge could not be installed" in one_sentence(output)
        assert "check the network and /etc/apt" in one_sentence(output)

    def test_that_pip_cannot_reach_a_registry_and_keeps_the_venv_for_the_next_time(
        self, machine: Machine
    ) -> None:
        machine.set("pip-says", "ERROR: No matching distribution found for torch==2.13.0\n")
        code, output = machine.run()
        assert code == 2
        assert "    ERROR: No matching distribution found" in output
        assert "check that pip reaches a package registry" in one_sentence(output)

        machine.unset("pip-says")
        assert machine.run()[0] == 0
        assert machine.calls("python3 -m venv") == []
        assert machine.calls("python -m pip")

    def test_that_the_disk_is_full(self, machine: Machine) -> None:
        machine.set("pip-says", "ERROR: [Errno 28] No space left on device\n")
        code, output = machine.run()
        assert code == 2
        assert "because the disk is full: free some space, then run this again" in one_sentence(output)

    def test_that_no_python_is_new_enough(self, machine: Machine) -> None:
        machine.fake("python3", "false")
        code, output = machine.run()
        assert code == 2
        assert "found no Python 3.10 or newer" in one_sentence(output)

    def test_that_this_is_no_debian(self, machine: Machine) -> None:
        machine.remove("dpkg-query")
        code, output = machine.run()
        assert code == 2
        assert output.splitlines() == [one_sentence(output)]
        assert "no Debian-like system" in output


class TestTheVenv:
    def test_is_made_anew_when_the_set_up_was_killed_while_pip_ran(self, machine: Machine) -> None:
        os.mkfifo(machine.state / "pip-waits")
        process = machine.start()
        try:
            wait_until(lambda: (machine.state / "calls").exists() and bool(machine.calls("python -m pip")))
        finally:
            kill_group(process)
        machine.unset("pip-waits")
        (machine.venv / "half-installed").touch()

        assert machine.run()[0] == 0

        assert machine.calls("python3 -m venv")
        assert not (machine.venv / "half-installed").exists()

    def test_is_made_anew_when_it_is_broken(self, machine: Machine) -> None:
        machine.venv.mkdir()
        assert machine.run()[0] == 0
        assert machine.calls("python3 -m venv")

    def test_is_made_anew_when_the_machines_python_changed(self, machine: Machine) -> None:
        machine.run()
        machine.set("version", "3.13.5")
        assert machine.run()[0] == 0
        assert machine.calls("python3 -m venv")

    def test_is_made_anew_when_the_clone_was_moved(self, machine: Machine) -> None:
        machine.run()
        machine.clone = machine.clone.rename(machine.clone.with_name("moved"))
        assert machine.run()[0] == 0
        assert machine.calls("python3 -m venv")

    def test_is_kept_and_brought_up_to_date_when_the_requirements_changed(self, machine: Machine) -> None:
        machine.run()
        with (machine.clone / "constraints.txt").open("a") as constraints:
            constraints.write("rich==15.0.0\n")
        assert machine.run()[0] == 0
        assert machine.calls("python3 -m venv") == []
        assert machine.calls("python -m pip")

    def test_that_somebody_made_by_hand_is_kept(self, machine: Machine) -> None:
        machine.run()
        (machine.venv / ".nvrx-setup").unlink()
        assert machine.run()[0] == 0
        assert machine.calls("python3 -m venv") == []
        assert machine.calls("python -m pip")

    def test_of_two_set_ups_at_once_is_made_once(self, machine: Machine) -> None:
        os.mkfifo(machine.state / "pip-waits")
        first = machine.start()
        second = None
        try:
            wait_until(lambda: (machine.state / "calls").exists() and bool(machine.calls("python -m pip")))
            second = machine.start()
            assert second.stdout is not None
            assert "waiting for another set-up" in second.stdout.readline()
            (machine.state / "pip-waits").write_text("go on\n")  # opens once pip reads
            assert first.wait(PATIENCE_S) == 0
            assert second.wait(PATIENCE_S) == 0
        finally:
            for process in (first, second):
                if process:
                    kill_group(process)
        assert len(machine.calls("python -m pip")) == 1


class TestNvrxTest:
    """The command itself: its set-up finds all packages there, so nothing of this machine is touched."""

    def test_names_each_check_with_its_time(self, machine: Machine) -> None:
        code, output = machine.run(machine.clone / "bin" / "nvrx-test", "-k", "recovery")
        assert code == 0, output
        for name in ("ruff check", "ruff format", "mypy", "import-linter", "pytest"):
            assert any(line.startswith(name) and line.endswith(" s") for line in output.splitlines())
        assert "nvrx-test: all passed" in output.splitlines()[-1]
        assert machine.calls("python -m pytest") == [
            "python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder -k recovery"
        ]

    def test_runs_all_checks_and_names_those_that_failed(self, machine: Machine) -> None:
        machine.set("fails/mypy")
        machine.set("fails/python")
        code, output = machine.run(machine.clone / "bin" / "nvrx-test")
        assert code == 1
        assert output.splitlines()[-1].startswith("nvrx-test: FAILED: mypy, pytest (")
        assert machine.calls("lint-imports")

    def test_can_stop_after_the_set_up(self, machine: Machine) -> None:
        code, _ = machine.run(machine.clone / "bin" / "nvrx-test", "--setup-only")
        assert code == 0
        assert machine.calls("ruff") == []

    @pytest.mark.parametrize("command", ["nvrx-test", "nvrx-quickstart"])
    def test_help_installs_nothing(self, machine: Machine, command: str) -> None:
        code, output = machine.run(machine.clone / "bin" / command, "--help")
        assert code == 0
        assert output.startswith(f"Usage: {command}")
        assert not machine.venv.exists()


class TestTheLauncher:
    def test_runs_the_command_of_its_name_also_through_a_link(self, machine: Machine, tmp_path: Path) -> None:
        command = machine.venv / "bin" / "nvrx-report"
        command.parent.mkdir(parents=True)
        command.write_text('#!/bin/sh\necho "report: $*"\n')
        command.chmod(0o755)
        (tmp_path / "elsewhere").mkdir()
        link = tmp_path / "elsewhere" / "nvrx-report"
        link.symlink_to(machine.clone / "bin" / "nvrx-report")
        output = subprocess.run([link, "a b"], capture_output=True, text=True, timeout=PATIENCE_S).stdout
        assert output == "report: a b\n"

    def test_says_how_to_set_up(self, machine: Machine) -> None:
        command = machine.clone / "bin" / "nvrx-srun"
        result = subprocess.run([command], capture_output=True, text=True, timeout=PATIENCE_S)
        assert result.returncode == 2
        programs = machine.clone / "bin"
        assert f"run {programs}/nvrx-quickstart or {programs}/nvrx-test once" in result.stderr
        assert f"or make {machine.clone}/.venv and install" in result.stderr

    def test_serves_every_console_script(self) -> None:
        links = {path.name for path in (REPOSITORY / "bin").iterdir() if path.is_symlink()}
        lines = (REPOSITORY / "setup.cfg").read_text().splitlines()
        scripts = {
            line.split("=")[0].strip() for line in lines if "nvrx_slurm.cli." in line and ":main" in line
        }
        assert links == scripts
