"""What becomes of a node whose Coordinator's host has fallen silent: the rim around :mod:`.lease_watch`.

One node claims the next fence. It requeues the job without the lost host or, with a standby, becomes the
Coordinator of the job; the others join it, or leave.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from dataclasses import dataclass

from nvrx_slurm.coordinator.handover import Handover
from nvrx_slurm.coordinator.job_end import has_lost
from nvrx_slurm.coordinator.lease import Fence, Lease, LeaseError, LeaseFile
from nvrx_slurm.coordinator.lease_watch import Claim, Join, LeaseWatch, Leave, Seen, Wait
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.slurm import SlurmClient, SlurmUnavailableError, UnknownJobError

LOOK_S = 2.0
_LOOK_TIMEOUT_S = 5.0
_SLURM_GRACE_S = 60.0
"""How long, beyond twice SlurmdTimeout, Slurm may take to miss a host that is lost."""


@dataclass(frozen=True)
class Won:
    """This node is in charge."""

    fence: Fence
    lost: str
    """The host that has fallen silent."""
    silent_s: float

    @property
    def why(self) -> str:
        return f"the Coordinator's host {self.lost} has been silent for {self.silent_s:.0f} s"


Outcome = Won | Join | Leave


class Successor:
    """Watches the lease for one node until it is clear what the node has to do."""

    def __init__(
        self, run_dir: RunDir, handover: Handover, node: str, fence: Fence, slurm: SlurmClient
    ) -> None:
        self._file = LeaseFile(run_dir.path)
        self._handover = handover
        self._node = node
        self._fence = fence
        self._slurm = slurm
        self._watch = LeaseWatch(fence, self._place_after)
        self._readers = concurrent.futures.ThreadPoolExecutor(1)
        self._looking: concurrent.futures.Future[Seen | None] | None = None
        self._slurm_has_lost_it = False
        self._slurm_patience: float | None = None

    def run(
        self, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
    ) -> Outcome:
        """Look every :data:`LOOK_S` until there is an outcome."""
        while True:
            match self._watch.look(clock(), self._look()):
                case Wait():
                    pass
                case Claim() as claim:
                    outcome = self._act(claim, clock())
                    if outcome is not None:
                        return outcome
                case decision:
                    return decision
            sleep(LOOK_S)

    def _place_after(self, lost: str) -> int:
        order = [node for node in self._handover.policy.nodes if node != lost]
        return order.index(self._node) if self._node in order else len(order)

    def _look(self) -> Seen | None:
        """Read lease and claims; None if they can't be read, or the file system does not answer."""
        if self._looking is None:
            self._looking = self._readers.submit(self._read)
        try:
            seen = self._looking.result(_LOOK_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            return None
        self._looking = None
        return seen

    def _read(self) -> Seen | None:
        try:
            lease = self._file.read()
            return None if lease is None else Seen(lease, self._file.highest_claim(self._fence))
        except LeaseError:
            return None

    def _act(self, claim: Claim, now: float) -> Outcome | None:
        """Take charge if it may be taken; None: look again."""
        if not self._handover.standby:
            refusal = self._slurm_objects(claim.lost, now)
            if refusal is not None:
                return refusal
            if not self._slurm_has_lost_it:
                return None
        try:
            if not self._file.claim(claim.fence, self._node):
                return None
            self._file.write(Lease(fence=str(claim.fence), counter=0, host=self._node))
        except OSError as error:
            return Leave(f"the run directory cannot be written: {error}")
        return Won(claim.fence, claim.lost, claim.silent_s)

    def _slurm_objects(self, host: str, now: float) -> Leave | None:
        """Return why the job must not be requeued; as long as Slurm hears from the host, nobody does it."""
        try:
            job = self._slurm.job(self._handover.job_id)
            if job.state != "RUNNING":
                return Leave(f"Slurm says that the job is {job.state}")
            if not job.batch or not job.requeue:
                return Leave(
                    "the job cannot be requeued: it is interactive, or was submitted with --no-requeue"
                )
            if self._slurm_patience is None:
                timeout = self._slurm.config().slurmd_timeout_s
                self._slurm_patience = now + 2 * timeout + _SLURM_GRACE_S
            gone = host not in job.nodes
            self._slurm_has_lost_it = gone or has_lost(self._slurm, host)
        except SlurmUnavailableError:
            self._slurm_has_lost_it = False
        except UnknownJobError:
            return Leave("Slurm does not know the job any more")
        if self._slurm_patience is None:
            self._slurm_patience = now + _SLURM_GRACE_S
        if not self._slurm_has_lost_it and now >= self._slurm_patience:
            return Leave(f"Slurm still hears from {host}, so the job is not requeued: look at that host")
        return None
