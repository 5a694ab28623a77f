"""From traces to culprits, and to the document ``fr.v1``."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution.flight_recorder.mismatch import Mismatch, find_mismatches
from nvrx_slurm.attribution.flight_recorder.read import Dumps, find_dumps, read_dumps
from nvrx_slurm.attribution.flight_recorder.stall import Lag, Stall
from nvrx_slurm.attribution.flight_recorder.trace import Op

SCHEMA = "fr.v1"
_MAX_WAITS = 16
_MAX_EVIDENCE = 4


class CulpritClass(str, enum.Enum):
    """How a rank was found, which says what is sick: its GPU, its host, its process, or the program."""

    DEVICE_LAG = "device-lag"
    """Launched an operation that others completed, and did not complete it."""
    HOST_LAG = "host-lag"
    """Never launched what the others launched, and waits for nobody."""
    NO_DUMP = "no_dump"
    """Others wait for it and it left no dump: a suspicion, unless its process is known to be gone."""
    DESYNC = "desync"
    """Ranks wait for each other in a circle."""
    MISMATCH = "mismatch"
    """Called something else than the majority."""


_CONFIDENCE = {
    CulpritClass.DEVICE_LAG: 0.8,
    CulpritClass.HOST_LAG: 0.6,
    CulpritClass.NO_DUMP: 0.3,
    CulpritClass.DESYNC: 0.5,
    CulpritClass.MISMATCH: 0.9,
}
_GONE_CONFIDENCE = 0.7
_LAGGING = (CulpritClass.DEVICE_LAG, CulpritClass.HOST_LAG)
CROWD_SHARE = 0.25
"""Where more of the ranks lag, and more of the nodes, the cause is something that they share."""
_NEVER_A_CROWD = 2


@dataclass(frozen=True)
class Place:
    """Where a rank ran, as the launcher knows it."""

    node: str
    gpu: int | None = None
    """Local rank, which is the GPU's index as the launcher gave it out."""


@dataclass(frozen=True)
class OpEvidence:
    """What shows a rank to be behind."""

    group: str
    description: str
    op: str
    sequence: int
    peer_max_completed: int | None = None
    peer_max_enqueued: int | None = None
    size: str = ""
    dtype: str = ""
    frame: str = ""


@dataclass(frozen=True)
class RankCulprit:
    """One rank held to be the cause."""

    rank: int
    kind: CulpritClass
    confidence: float
    node: str | None = None
    gpu: int | None = None
    evidence: tuple[OpEvidence, ...] = ()

    @property
    def is_suspicion(self) -> bool:
        """Too weak to act on: a missing dump alone."""
        return self.confidence <= _CONFIDENCE[CulpritClass.NO_DUMP]


@dataclass
class FlightReport:
    """What the dumps of one stall say."""

    world_size: int
    versions: tuple[str, ...]
    present: int
    missing: tuple[int, ...]
    groups_checked: int
    culprits: tuple[RankCulprit, ...] = ()
    victims: tuple[int, ...] = ()
    wait_for: dict[int, list[int]] = field(default_factory=dict)
    mismatches: tuple[Mismatch, ...] = ()
    fabric: str = ""
    """All ranks wait in one operation, or too many lag: what they share is suspected, and no rank."""
    moving: str = ""
    """The ranks were still going on when the dumps were taken: nobody can be told to be stuck."""
    caveats: tuple[str, ...] = ()

    @property
    def conclusive(self) -> bool:
        return any(not culprit.is_suspicion for culprit in self.culprits)

    def document(self) -> dict[str, Any]:
        """Return ``fr.v1`` as plain values."""
        return {
            "schema": SCHEMA,
            "versions": list(self.versions),
            "world_size": self.world_size,
            "dumps": {"present": self.present, "missing": list(self.missing)},
            "groups_checked": self.groups_checked,
            "culprits": [_culprit_document(culprit) for culprit in self.culprits],
            "victims": list(self.victims),
            "wait_for": {str(rank): ranks for rank, ranks in self.wait_for.items()},
            "mismatches": [
                {
                    "group": found.group.name,
                    "desc": found.group.description,
                    "seq": found.sequence,
                    "ranks": list(found.ranks),
                    "what": found.what,
                }
                for found in self.mismatches
            ],
            "fabric": self.fabric,
            "moving": self.moving,
            "caveats": list(self.caveats),
        }


def analyze_directory(
    directory: Path,
    *,
    world_size: int | None = None,
    places: Mapping[int, Place] | None = None,
    gone: Collection[int] = (),
    workers: int | None = None,
) -> FlightReport:
    """Read every dump in a directory and analyse it; see :func:`analyze`.

    Raises:
        OSError: the directory cannot be read.
    """
    return analyze(
        read_dumps(find_dumps(directory), workers), world_size=world_size, places=places, gone=gone
    )


def analyze(
    dumps: Dumps,
    *,
    world_size: int | None = None,
    places: Mapping[int, Place] | None = None,
    gone: Collection[int] = (),
) -> FlightReport:
    """Find the culprits.

    Args:
        dumps: one trace per rank; some may be missing.
        world_size: ranks of the job; without it, the highest rank that a dump or a group names.
        places: where ranks ran, from the launcher's table.
        gone: ranks whose process is known to have ended before the stall.
    """
    traces = dumps.traces
    stall = Stall(traces, world_size or 0)
    named = max((max(members) for members in stall.members.values() if members), default=-1)
    world = world_size or max(named, *traces, -1, -1) + 1
    if world != stall.world_size:
        stall = Stall(traces, world)
    missing = tuple(rank for rank in range(world) if rank not in traces)
    finder = _Finder(stall, places or {}, frozenset(gone))
    culprits, victims, mismatches = finder.find()
    crowd = _crowd(culprits, stall, places or {})
    if crowd:
        culprits = [_suspected(culprit) if culprit.kind in _LAGGING else culprit for culprit in culprits]
    return FlightReport(
        world_size=world,
        versions=tuple(sorted({trace.version for trace in traces.values()})),
        present=len(traces),
        missing=missing,
        groups_checked=len(stall.members) - len(stall.mixed),
        culprits=tuple(culprits),
        victims=tuple(victims),
        wait_for={rank: waits for rank in victims if (waits := stall.waits_for(rank, _MAX_WAITS))},
        mismatches=tuple(mismatches),
        fabric=crowd or ("" if culprits or mismatches else _fabric(stall)),
        moving=finder.moving,
        caveats=tuple(dumps.caveats),
    )


def _crowd(culprits: Sequence[RankCulprit], stall: Stall, places: Mapping[int, Place]) -> str:
    """Return why those that lag are no culprits: they are too many, and not those of few nodes."""
    lagging = [culprit for culprit in culprits if culprit.kind in _LAGGING]
    if len(lagging) <= max(_NEVER_A_CROWD, CROWD_SHARE * stall.world_size):
        return ""
    nodes = {place.node for place in places.values()}
    theirs = {culprit.node for culprit in lagging}
    if nodes and None not in theirs and len(theirs) <= max(1, CROWD_SHARE * len(nodes)):
        return ""
    return (
        f"{len(lagging)} of {stall.world_size} ranks lag, more than {CROWD_SHARE:.0%}: the cause is rather "
        "what they share, such as the fabric or a file server"
    )


def _suspected(culprit: RankCulprit) -> RankCulprit:
    return replace(culprit, confidence=_CONFIDENCE[CulpritClass.NO_DUMP])


class _Finder:
    def __init__(self, stall: Stall, places: Mapping[int, Place], gone: frozenset[int]) -> None:
        self._stall = stall
        self._places = places
        self._gone = gone
        self._mismatches: list[Mismatch] = []
        self.moving = ""

    def find(self) -> tuple[list[RankCulprit], list[int], Sequence[Mismatch]]:
        """Return culprits, victims and mismatches."""
        stall = self._stall
        device, fresh_device = _settled(stall, stall.device_lags())
        host, fresh_host = _settled(stall, stall.host_lags())
        found: dict[int, RankCulprit] = {}
        for rank in _ranks(device):
            found[rank] = self._culprit(rank, CulpritClass.DEVICE_LAG, _of(device, rank))
        for rank in _ranks(host):
            if rank not in found and not stall.waits_on_somebody(rank):
                found[rank] = self._culprit(rank, CulpritClass.HOST_LAG, _of(host, rank))
        for rank in self._missing(found):
            found[rank] = self._culprit(rank, CulpritClass.NO_DUMP, [])
        fresh = sorted({lag.rank for lag in (*fresh_device, *fresh_host)})
        if fresh and all(culprit.is_suspicion for culprit in found.values()):
            self.moving = (
                f"rank {fresh[0]} is behind by what others launched only when its trace was taken, or just "
                "before: the job was slow rather than stuck, or went on before the last trace was taken"
            )
            return [], fresh, []
        if not found:
            # Of a pipeline's operations no numbers can be compared; but who waits for nothing does not send.
            for rank in self._idle():
                found[rank] = self._culprit(rank, CulpritClass.HOST_LAG, [])
        if not found:
            found = self._of_the_program()
        behind = sorted({lag.rank for lag in (*device, *host)} | set(stall.heads))
        victims = [rank for rank in behind if rank not in found]
        return [found[rank] for rank in sorted(found)], victims, self._mismatches

    def _missing(self, found: Collection[int]) -> list[int]:
        unexplained = self._stall.stalled_without(found)
        reached = self._stall.reachable_from(unexplained)
        # A rank whose process is gone is a cause even where another culprit would do as an explanation.
        dead = self._gone & self._stall.reachable_from(self._stall.heads)
        return sorted((reached | dead) - set(self._stall.traces))

    def _idle(self) -> list[int]:
        """Return the ranks whose peers wait to receive from them, and that wait in no operation."""
        stall = self._stall
        waits = {op for op in stall.heads.values() if op.peers is not None}
        waited_for = {rank for op in waits for rank in stall.blockers(op)} & set(stall.traces)
        return sorted(waited_for - set(stall.heads))

    def _of_the_program(self) -> dict[int, RankCulprit]:
        self._mismatches = find_mismatches(self._stall.traces, self._stall.members)
        minority = {rank: found for found in self._mismatches for rank in found.ranks}
        if minority:
            return {
                rank: self._culprit(
                    rank, CulpritClass.MISMATCH, [Lag(rank, m.group, m.sequence, m.sequence, m.theirs)]
                )
                for rank, m in minority.items()
            }
        if self._mismatches:
            return {}
        return {rank: self._culprit(rank, CulpritClass.DESYNC, []) for rank in self._stall.circle()}

    def _culprit(self, rank: int, kind: CulpritClass, lags: Sequence[Lag]) -> RankCulprit:
        place = self._places.get(rank)
        trace = self._stall.traces.get(rank)
        gone = kind is CulpritClass.NO_DUMP and rank in self._gone
        return RankCulprit(
            rank=rank,
            kind=kind,
            confidence=_GONE_CONFIDENCE if gone else _CONFIDENCE[kind],
            node=place.node if place else trace.node if trace else None,
            gpu=place.gpu if place else None,
            evidence=tuple(_evidence(lag, kind) for lag in lags[:_MAX_EVIDENCE]),
        )


def _settled(stall: Stall, lags: Sequence[Lag]) -> tuple[list[Lag], list[Lag]]:
    """Return the lags that last, and those that may be over a moment later."""
    settled: list[Lag] = []
    fresh: list[Lag] = []
    for lag in lags:
        (fresh if stall.is_fresh(lag) else settled).append(lag)
    return settled, fresh


def _ranks(lags: Sequence[Lag]) -> list[int]:
    return sorted({lag.rank for lag in lags})


def _of(lags: Sequence[Lag], rank: int) -> list[Lag]:
    return [lag for lag in lags if lag.rank == rank]


def _evidence(lag: Lag, kind: CulpritClass) -> OpEvidence:
    op = lag.op or Op()
    frame = op.frames[0] if op.frames else None
    return OpEvidence(
        group=lag.group.name,
        description=lag.group.description,
        op=op.kind,
        sequence=lag.mine,
        peer_max_completed=lag.theirs if kind is CulpritClass.DEVICE_LAG else None,
        peer_max_enqueued=lag.theirs if kind is CulpritClass.HOST_LAG else None,
        size=str(op.input_sizes) if op.input_sizes else "",
        dtype=",".join(op.input_dtypes),
        frame=f"{frame.filename}:{frame.line} {frame.name}" if frame else "",
    )


def _culprit_document(culprit: RankCulprit) -> dict[str, Any]:
    return {
        "rank": culprit.rank,
        "node": culprit.node,
        "gpu": culprit.gpu,
        "class": culprit.kind.value,
        "confidence": culprit.confidence,
        "evidence": [
            {
                "group": found.group,
                "desc": found.description,
                "op": found.op,
                "seq": found.sequence,
                "peer_max_completed": found.peer_max_completed,
                "peer_max_enqueued": found.peer_max_enqueued,
                "size": found.size,
                "dtype": found.dtype,
                "frame": found.frame,
            }
            for found in culprit.evidence
        ],
    }


def _fabric(stall: Stall) -> str:
    """Return what all ranks wait in, if it is one operation that nobody is behind in."""
    heads = Counter(stall.heads.values())
    if len(heads) != 1 or len(stall.heads) < 2 or len(stall.heads) < len(stall.traces):
        return ""
    (op,) = heads
    name = op.group.description or op.group.name or "the default group"
    return f"all {len(stall.heads)} ranks wait in operation {op.sequence} of {name}"
