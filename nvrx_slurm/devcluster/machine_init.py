"""The first process of one simulated machine.

Run as a script, by file name, with the interpreter's site packages off: only the standard library, and up in
milliseconds. It makes the machine's namespaces, builds its view of the file system, starts its daemons and
from then on collects orphans, as any init does; when it is killed, the kernel kills all that runs inside.

It talks to the command that started it in lines: it reads a description of the machine as JSON, says
``pid N`` once its namespaces are as they shall be, waits for ``go`` (the network cable is in), and says
``ready`` or ``error WHY``. When that command dies before ``go``, this process ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
MNT_DETACH = 2

NEW_ROOT = "/tmp"
"""The machine's own root is put together here: the one directory that no node takes over from the host."""

OWN_DIRECTORIES = ("proc", "sys", "run", "tmp", "local", "lost+found")

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {doing}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() or None)
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None)
    _checked(result, f"mount {kind or source} at {target}")


def _tmpfs(target: str, mode: str, size: str = "") -> None:
    os.makedirs(target, exist_ok=True)
    _mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode}" + (f",size={size}" if size else ""))


def take_over(source: str, target: str) -> None:
    """Show a file, directory or link of the host's in a directory of ours, where nothing has its name."""
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    else:
        make_mount_point(source, target)
        _mount(source, target, flags=MS_BIND | MS_REC)


def make_mount_point(source: str, target: str) -> None:
    """Make what ``source`` can be mounted over."""
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def graft(source: str, target: str, covered: set[str]) -> None:
    """Show ``source`` at ``target``, also where the kernel has nothing of that name and lets nobody make it.

    Args:
        covered: directories that are ours by now; grows.
    """
    if not os.path.exists(target):
        directory = os.path.dirname(target)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        if directory not in covered:
            cover(directory)
            covered.add(directory)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        make_mount_point(source, target)
    _mount(source, target, flags=MS_BIND)


def cover(directory: str) -> None:
    """Put a directory of ours over one of the kernel's, which shows the same and can be added to."""
    original = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        names = os.listdir(directory)
        _tmpfs(directory, "0755")
        for name in names:
            take_over(f"/proc/self/fd/{original}/{name}", os.path.join(directory, name))
    finally:
        os.close(original)


def mounts_below(path: str) -> list[str]:
    """The outermost mount points below ``path``."""
    with open("/proc/self/mountinfo") as table:
        points = sorted({line.split()[4] for line in table})
    outermost: list[str] = []
    for point in points:
        if point.startswith(path + "/") and not any(point.startswith(other + "/") for other in outermost):
            outermost.append(point)
    return outermost


def build_root(spec: dict[str, Any]) -> None:
    """Private /tmp, /run, /dev/shm, /proc, /sys and /etc/hosts; everything else is the host's."""
    # A mount or unmount on the host shows inside, never the other way round.
    _mount("none", "/", flags=MS_REC | MS_SLAVE)
    # Once the new root is in place, what lies below can only be reached by what was opened before.
    shares = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in spec["shares"]}
    _tmpfs(NEW_ROOT, "0755", "4m")
    with os.scandir("/") as entries:
        for entry in entries:
            if entry.name not in OWN_DIRECTORIES:
                take_over(entry.path, os.path.join(NEW_ROOT, entry.name))
    for directory in ("proc", "sys"):
        os.mkdir(os.path.join(NEW_ROOT, directory))
    _mount("proc", NEW_ROOT + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # A fresh one, because it shows the network devices of this machine; control groups live below the old.
    _mount("sysfs", NEW_ROOT + "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for point in mounts_below("/sys"):
        if os.path.isdir(NEW_ROOT + point):
            _mount(point, NEW_ROOT + point, flags=MS_BIND | MS_REC)
    _tmpfs(NEW_ROOT + "/run", "0755")
    _tmpfs(NEW_ROOT + "/tmp", "1777")
    _tmpfs(NEW_ROOT + "/dev/shm", "1777")
    for directory, mode in (("/run/lock", 0o1777), ("/run/user", 0o755)):
        os.mkdir(NEW_ROOT + directory)
        os.chmod(NEW_ROOT + directory, mode)
    for path, handle in shares.items():
        os.makedirs(NEW_ROOT + path, exist_ok=True)
        _mount(f"/proc/self/fd/{handle}", NEW_ROOT + path, flags=MS_BIND | MS_REC)
        os.close(handle)
    for source, target in spec["binds"]:
        if not os.path.exists(NEW_ROOT + target):
            os.makedirs(NEW_ROOT + target)
        _mount(source, NEW_ROOT + target, flags=MS_BIND)
    covered: set[str] = set()
    for source, target in spec["grafts"]:
        graft(source, NEW_ROOT + target, covered)
    # What someone writes to the root directory would be neither shared nor kept: refuse it.
    _mount("none", NEW_ROOT, flags=MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(NEW_ROOT)
    _checked(_libc.pivot_root(b".", b"."), "change the root directory")
    _checked(_libc.umount2(b".", MNT_DETACH), "let go of the old root directory")
    os.chdir("/")


def set_up_network(spec: dict[str, Any]) -> None:
    done = subprocess.run(
        [spec["ip"], "-batch", "-"], input="\n".join(spec["network"]) + "\n", capture_output=True, text=True
    )
    if done.returncode != 0:
        raise OSError(f"cannot set up the network: {done.stderr.strip()}")


def spawn(service: dict[str, Any], environment: dict[str, str], console: str) -> int:
    """Start one daemon with a clean slate: no terminal, no inherited signal settings."""
    every_signal = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    argv: list[str] = service["argv"]
    return os.posix_spawn(
        argv[0],
        argv,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=every_signal,
    )


def await_socket(path: str, pid: int, name: str) -> None:
    """Wait until the daemon ``pid`` answers on its Unix socket."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(path)
            return
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise OSError(f"{name} ended right after it was started")
        time.sleep(0.005)
    raise OSError(f"{name} does not answer on {path}")


def record_process(path: str) -> int:
    """Leave this process's id, as the host sees it, and its start time where ``down`` finds them."""
    with open("/proc/self/stat") as file:
        line = file.read()
    pid = int(line.split()[0])
    started = line.rpartition(")")[2].split()[19]
    with open(path + ".new", "w") as file:
        file.write(f"{pid} {started}\n")
    os.replace(path + ".new", path)
    return pid


def collect_orphans(daemons: dict[int, str]) -> NoReturn:
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                if pid in daemons:
                    code = os.waitstatus_to_exitcode(status)
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    print(f"{time.strftime('%FT%T')} {daemons.pop(pid)} ended: {how}", flush=True)


def run(spec: dict[str, Any]) -> NoReturn:
    os.umask(0o022)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    pid = record_process(spec["record"])
    os.close(spec["lock_fd"])
    socket.sethostname(spec["hostname"])
    build_root(spec)
    say(f"pid {pid}")
    if sys.stdin.readline() != "go\n":
        sys.exit(1)
    set_up_network(spec)
    daemons: dict[int, str] = {}
    for service in spec["services"]:
        name = os.path.basename(service["argv"][0])
        pid = spawn(service, spec["environment"], spec["console"])
        if service["socket"]:
            await_socket(service["socket"], pid, name)
        daemons[pid] = name
    say("ready")
    console = os.open(spec["console"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(console, 1)
    os.dup2(console, 2)
    collect_orphans(daemons)


def say(line: str) -> None:
    print(line.replace("\n", " "), flush=True)


def main() -> None:
    line = sys.stdin.readline()
    if not line:
        sys.exit(1)
    spec = json.loads(line)
    try:
        _checked(
            _libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET),
            "make namespaces (a container has to be a privileged one)",
        )
        # Only a child becomes the first process of the new process id namespace.
        if os.fork():
            os._exit(0)
        run(spec)
    except OSError as error:
        with contextlib.suppress(OSError):
            say(f"error {error.strerror or error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
