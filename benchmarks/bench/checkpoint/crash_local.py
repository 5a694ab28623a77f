"""Kill ranks, their workers, or pretended nodes while they save locally; restart, and see what loads."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import torch.distributed as dist

from bench.checkpoint.crash_rank import WORLD, directory_of, node_of, serve

_PATIENCE_S = 120.0
_context = multiprocessing.get_context("forkserver")
# Ranks are forked from a process that has imported what they need, as they are on a node.
_context.set_forkserver_preload(["bench.checkpoint.crash_rank"])


class Victim(Enum):
    RANK = "rank"
    WORKER = "worker"
    NODE = "node"
    """Its ranks, their workers, and its disk."""


class LostError(RuntimeError):
    """What loads is not what it must be."""


class Ranks:
    """All ranks of one start, and what they have said."""

    def __init__(self, folder: Path) -> None:
        self.committed = -1
        """The newest iteration that some rank has finalized."""
        self.began = -1
        self.save_s = 0.0
        """From one commit of rank 0 to the next."""
        self.workers: dict[int, psutil.Process] = {}
        self._committed_at = 0.0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: dict[Connection, int] = {}
        self.processes: list[ForkServerProcess] = []
        for rank in range(WORLD):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=serve, args=[rank, folder, self._store.port, theirs], daemon=True
            )
            process.start()
            theirs.close()
            self._pipes[ours] = rank
            self.processes.append(process)

    def loaded(self) -> int:
        """Return the iteration that all ranks have loaded."""
        found: dict[int, tuple[str, int]] = {}
        for word, number, rank in self._said():
            if word in ("loaded", "mixed"):
                found[rank] = word, number
            if len(found) == WORLD:
                break
        if any(word == "mixed" for word, _ in found.values()):
            raise LostError(f"what loads is not one iteration to the last bit: {found}")
        iterations = {number for _, number in found.values()}
        if len(iterations) > 1:
            raise LostError(f"ranks load different iterations: {found}")
        return iterations.pop()

    def two_commits(self, rank: int) -> None:
        """Wait until ``rank`` has finalized two saves that have not begun yet, as far as it has said."""
        commits, begun = 0, self.began
        for word, number, who in self._said():
            commits += (word, who) == ("committed", rank) and number > begun + 1
            if commits == 2:
                return

    def _said(self) -> Iterator[tuple[str, int, int]]:
        deadline = time.monotonic() + _PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            yield from self._news(left)
        raise LostError(f"ranks have not said for {_PATIENCE_S:g} s what was waited for")

    def _news(self, patience_s: float) -> Iterator[tuple[str, int, int]]:
        pipe = next(iter(wait(list(self._pipes), patience_s)), None)
        if not isinstance(pipe, Connection):
            return
        rank = self._pipes[pipe]
        try:
            word, number = pipe.recv()
        except EOFError:
            del self._pipes[pipe]
            if not self._pipes:
                raise LostError("all ranks have ended by themselves") from None
            return
        match word:
            case "worker":
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.workers[rank] = psutil.Process(number)
            case "began":
                self.began = max(self.began, number)
            case "committed":
                self.committed = max(self.committed, number)
                if rank == 0:
                    now = time.monotonic()
                    self.save_s, self._committed_at = now - (self._committed_at or now), now
        yield word, number, rank

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def kill_worker(self, rank: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.workers[rank].kill()

    def end(self) -> None:
        """Kill the ranks, let their workers finish, and hear what was said before."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        psutil.wait_procs(list(self.workers.values()), timeout=_PATIENCE_S)
        with contextlib.suppress(LostError):
            while True:
                for _ in self._news(1.0):
                    pass


def strike(folder: Path, kills: int, draw: random.Random, note: Callable[[Victim], None]) -> Iterator[str]:
    """Kill so often; yield what must not be.

    Args:
        note: is told of each kill.
    """
    committed = began = -1
    left = kills
    lost: int | None = None
    """The node that is lost."""
    while left:
        if lost is not None:
            shutil.rmtree(directory_of(folder, lost), ignore_errors=True)
            lost = None
        ranks = Ranks(folder)
        try:
            loaded = ranks.loaded()
            if not committed <= loaded <= max(began, committed):
                yield f"local: iteration {committed} was committed, {loaded} was loaded"
            ranks.two_commits(0)
            while left:
                victim = draw.choice([Victim.RANK, Victim.NODE, Victim.WORKER, Victim.WORKER])
                rank = draw.randrange(WORLD)
                threading.Event().wait(draw.uniform(0, 1.2 * ranks.save_s))  # the random moment
                _kill(ranks, victim, rank)
                left -= 1
                note(victim)
                lost = node_of(rank) if victim is Victim.NODE else None
                if victim is not Victim.WORKER:
                    break
                # The next loss may come when the lost copies have been made up for.
                ranks.two_commits(rank)
            threading.Event().wait(draw.uniform(0, 0.05))  # until the agents stop the others
        except LostError as error:
            yield f"local: {error}"
        finally:
            ranks.end()
        committed, began = max(committed, ranks.committed), max(began, ranks.began)


def _kill(ranks: Ranks, victim: Victim, rank: int) -> None:
    match victim:
        case Victim.RANK:
            ranks.kill(rank)
        case Victim.WORKER:
            ranks.kill_worker(rank)
        case Victim.NODE:
            for each in range(WORLD):
                if node_of(each) == node_of(rank):
                    ranks.kill(each)
                    ranks.kill_worker(each)
