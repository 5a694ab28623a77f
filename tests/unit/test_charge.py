"""What a Coordinator does that is alone, or has been replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.coordinator import charge, lease_keeper
from nvrx_slurm.coordinator.charge import EXIT_REPLACED, Charge
from nvrx_slurm.coordinator.lease import Fence, Lease, LeaseFile
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.slurm import SlurmUnavailableError
from nvrx_slurm.testing import FakeSlurmClient, running_job

F0, F1 = Fence("7", 0, 0), Fence("7", 0, 1)


class Rig:
    def __init__(self, path: Path) -> None:
        self.file = LeaseFile(path)
        self.slurm = FakeSlurmClient(running_job("7", ["n1", "n2"]))
        self.replaced = 0
        self.said: list[str] = []
        self.charge = Charge(RunDir(path), F0, "n1", self.slurm, self._replaced, self.said.append)

    def _replaced(self) -> None:
        self.replaced += 1

    @property
    def lease(self) -> Lease:
        found = self.file.read()
        assert found is not None
        return found

    def take_over(self, fence: Fence = F1, **fields: object) -> None:
        self.file.write(Lease(fence=str(fence), counter=1, host="n2", **fields))  # type: ignore[arg-type]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(lease_keeper, "RENEW_S", 0.02)
    monkeypatch.setattr(charge, "_ASK_S", 0.02)
    monkeypatch.setattr(charge, "_LOOK_S", 0.02)
    monkeypatch.setattr(charge, "LAPSE_S", 0.1)
    return Rig(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 60)


def test_the_lease_is_renewed_until_the_job_ends_and_then_holds_its_exit_code(rig: Rig) -> None:
    async def run() -> None:
        rig.charge.begin("10.0.0.1:5")
        await until(lambda: rig.lease.counter > 3)
        await rig.charge.end(75)

    asyncio.run(run())
    assert (rig.lease.fence, rig.lease.address, rig.lease.ended) == ("7.0.0", "10.0.0.1:5", 75)


def test_whoever_is_replaced_is_told_once_and_writes_no_more(rig: Rig) -> None:
    async def run() -> None:
        rig.charge.begin("10.0.0.1:5")
        rig.take_over()
        await until(lambda: rig.replaced > 0)
        assert not rig.charge.holds()
        assert not rig.charge.confirm()
        await rig.charge.end(0)

    asyncio.run(run())
    assert rig.replaced == 1
    assert rig.lease.host == "n2"
    assert rig.lease.ended is None


def test_a_coordinator_that_is_alone_renews_nothing_until_slurm_answers(rig: Rig) -> None:
    rig.slurm.unavailable = SlurmUnavailableError("no route")
    cut_off: list[bool] = []

    async def run() -> None:
        rig.charge.begin("10.0.0.1:5")
        alone = asyncio.create_task(rig.charge.while_alone(lambda: True, lambda: cut_off.append(True)))
        await until(lambda: bool(cut_off))
        counter = rig.lease.counter
        await asyncio.sleep(0.2)
        assert rig.lease.counter == counter, "it stands still"
        rig.slurm.unavailable = None
        await asyncio.wait_for(alone, 10)
        await until(lambda: rig.lease.counter > counter)
        await rig.charge.end(0)

    asyncio.run(run())
    assert cut_off == [True]


def test_a_coordinator_whose_nodes_come_back_is_not_cut_off(rig: Rig) -> None:
    rig.slurm.unavailable = SlurmUnavailableError("no route")
    asyncio.run(rig.charge.while_alone(iter([True, False]).__next__, pytest.fail))


def follow(rig: Rig, later: Callable[[], None]) -> int:
    async def run() -> int:
        rig.charge.begin("10.0.0.1:5")
        rig.take_over()
        assert not rig.charge.confirm()
        following = asyncio.create_task(rig.charge.follow())
        await asyncio.sleep(0.1)
        assert not following.done()
        later()
        return await asyncio.wait_for(following, 10)

    return asyncio.run(run())


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_old_coordinator_ends_as_the_job_does_under_its_successor(rig: Rig, code: int) -> None:
    assert follow(rig, lambda: rig.take_over(ended=code)) == code


def test_the_old_coordinator_follows_a_successor_of_its_successor(rig: Rig) -> None:
    assert follow(rig, lambda: rig.take_over(Fence("7", 0, 2), ended=3)) == 3


def test_the_old_coordinator_ends_when_slurm_starts_the_job_again(rig: Rig) -> None:
    assert follow(rig, lambda: rig.take_over(Fence("7", 1, 0))) == EXIT_REPLACED


def test_the_old_coordinator_can_be_cancelled(rig: Rig) -> None:
    assert follow(rig, lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143


def test_the_old_coordinator_does_not_wait_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charge, "_GIVE_UP_S", 1.5)
    assert follow(rig, lambda: None) == EXIT_REPLACED
    assert "giving up" in rig.said[-1]


def test_a_coordinator_of_an_earlier_start_does_not_wait_at_all(rig: Rig) -> None:
    async def run() -> int:
        rig.charge.begin("10.0.0.1:5")
        rig.take_over(Fence("7", 1, 0))
        assert not rig.charge.confirm()
        return await asyncio.wait_for(rig.charge.follow(), 10)

    assert asyncio.run(run()) == EXIT_REPLACED
