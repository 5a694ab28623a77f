"""Boot one simulated machine, tell whether it runs, enter it, and cut its power."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from nvrx_slurm.devcluster import machine_init, network, process
from nvrx_slurm.devcluster.errors import DevClusterError
from nvrx_slurm.devcluster.network import Subnet
from nvrx_slurm.devcluster.process import ProcessRecord

_PATIENCE_S = 20.0


@dataclasses.dataclass(frozen=True)
class Service:
    """A daemon of a machine; the next one starts when this one answers on ``socket``, if it has one."""

    argv: tuple[str, ...]
    socket: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that makes a machine."""

    name: str
    record: Path
    console: Path
    binds: tuple[tuple[Path, str], ...]
    """Files and directories of the host, and where they appear inside."""
    shares: tuple[str, ...]
    """Directories of the host that appear where they are, in spite of what the machine has there itself."""
    grafts: tuple[tuple[Path, str], ...]
    """As ``binds``, over or beside files of the kernel's own."""
    services: tuple[Service, ...]
    environment: dict[str, str]
    ip: str


class Booting:
    """A machine on its way up: it makes its namespaces, is plugged in, and starts its daemons."""

    def __init__(self, plan: Plan, subnet: Subnet, lock_fd: int) -> None:
        self._plan = plan
        spec = {
            "hostname": plan.name,
            "record": str(plan.record),
            "console": str(plan.console),
            "binds": [[str(source), target] for source, target in plan.binds],
            "shares": plan.shares,
            "grafts": [[str(source), target] for source, target in plan.grafts],
            "services": [dataclasses.asdict(service) for service in plan.services],
            "environment": plan.environment,
            "ip": plan.ip,
            "network": network.member_commands(subnet, plan.name),
            "lock_fd": lock_fd,
        }
        # It inherits the cluster's lock until it has left its process record: `down` cannot come in between.
        title = f"{plan.record.parents[1].name}/{plan.name}"
        with plan.console.open("ab") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", machine_init.__file__, title],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                cwd="/",
                pass_fds=(lock_fd,),
            )
        self._tell(json.dumps(spec))

    @property
    def name(self) -> str:
        return self._plan.name

    def pid(self) -> int:
        """Wait for the namespaces; gives the id of the process that lives in them."""
        return int(self._expect("pid"))

    def go(self) -> None:
        """The network cable is in: start the daemons."""
        self._tell("go")

    def wait_until_ready(self) -> None:
        self._expect("ready")
        self.close()

    def close(self) -> None:
        """Let go of it; one that was not told to go ends by this."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then the next answer tells why it is gone
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _expect(self, word: str) -> str:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            answered = selector.select(_PATIENCE_S)
        if not answered:
            raise DevClusterError(f"machine {self.name} does not say {word!r} within {_PATIENCE_S:g} s")
        said, _, rest = self._process.stdout.readline().decode(errors="replace").strip().partition(" ")
        if said == word:
            return rest
        evidence = complaint_in(self._plan.console)
        why = "; ".join(filter(None, (rest, evidence and f"its console says: {evidence}")))
        raise DevClusterError(f"machine {self.name} does not boot: {why or 'it ended without a word'}")


def boot(plans: Sequence[Plan], subnet: Subnet, lock_fd: int, before_services: Callable[[], None]) -> None:
    """Boot the machines side by side: the first one, then ``before_services()``, then the others.

    Raises:
        DevClusterError: one does not come up.
    """
    with contextlib.ExitStack() as stack:
        booting = []
        for plan in plans:
            machine = Booting(plan, subnet, lock_fd)
            stack.callback(machine.close)
            booting.append(machine)
        network.plug_in(subnet, {machine.name: machine.pid() for machine in booting})
        first, *others = booting
        first.go()
        first.wait_until_ready()
        before_services()
        for machine in others:
            machine.go()
        for machine in others:
            machine.wait_until_ready()


def running(record: Path) -> ProcessRecord | None:
    """The machine's first process, while it lives."""
    found = ProcessRecord.read(record)
    return found if found is not None and found.is_alive() else None


def has_daemon(machine: ProcessRecord, name: str) -> bool:
    """Whether the machine's daemon of this name runs."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(machine.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                    return True
    return False


def power_off(records: Iterable[Path]) -> None:
    """End every process of the machines at once, and forget them.

    Besides what runs in a machine's process id namespace (which the kernel ends with its first process) that
    is whatever else has entered its network.
    """
    paths = tuple(records)
    machines = tuple(machine for path in paths if (machine := running(path)) is not None)
    # While they live: afterwards, somebody else's network may have the same number.
    process.kill(process.sharing_networks(machines))
    for path in paths:
        path.unlink(missing_ok=True)


def enter(machine: ProcessRecord, argv: Sequence[str], directory: str) -> list[str]:
    """The command line that runs ``argv`` inside the machine, in ``directory`` if that exists there."""
    go_there = 'cd -- "$0" 2>/dev/null || cd /; exec "$@"'
    # --root: where this whole machine is a chroot, its mount namespace begins outside of it.
    namespaces = ("--mount", "--root", "--wdns=/", "--uts", "--ipc", "--net", "--pid")
    target = ("nsenter", "--target", str(machine.pid), *namespaces)
    return [*target, "--", "/bin/sh", "-c", go_there, directory, *argv]


def complaint_in(console: Path) -> str:
    """What a machine's daemons said last that is bad, or just last: evidence for a message."""
    try:
        with console.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    bad = [line for line in lines if re.search(r"fatal|error", line, re.IGNORECASE)]
    return (bad or lines or [""])[-1]


def wait_for(condition: Callable[[], bool], patience_s: float, interval_s: float = 0.05) -> bool:
    """Ask until it is so; False when it is not after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval_s)
    return True
