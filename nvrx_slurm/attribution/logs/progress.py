"""How far training had come, whatever framework printed it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TOKENS = (b"iter", b"step", b"it/s", b"s/it", b"epoch", b"checkpoint")
"""Every line that a shape matches contains one of these, in lower case."""
_NOT_TRAINING = re.compile(
    r"loading|download|fetch|generat|tokeniz|\bmap\b|\bmap:|filter|shard|saving|writing|upload|evaluat|\beval|valid"
    r"|packing|warming|warmup steps|compil|casting|index"
)
_LOSS = re.compile(r"loss|tokens|tflops|samples|grad|throughput|lr\b|learning")
_SAVED = (
    re.compile(r"successfully saved checkpoint.{0,120}?(?:iteration|step)\s{0,8}(\d{1,15})"),
    re.compile(
        r"\bsaved\b.{0,80}(?:checkpoint|ckpt|state).{0,120}?(?:step|iter(?:ation)?"
        r"|checkpoint)s?[-_=: ]{0,4}(\d{1,15})"
    ),
    re.compile(
        r"(?:checkpoint|ckpt)\b.{0,120}?(?:step|iter(?:ation)?|checkpoint)?s?[-_=: ]{0,4}(\d{1,15})\b.{0,60}"
        r"\b(?:saved|written|is complete|completed|committed|finali[sz]ed|done)\b"
    ),
)
_LOADED = (
    re.compile(
        r"\bloaded\b.{0,40}(?:checkpoint|ckpt|state).{0,240}?(?:iteration|step|checkpoint)[-_=: "
        r"]{0,4}(\d{1,15})"
    ),
    re.compile(
        r"\b(?:resum|restor|continu)\w{1,4}\b.{0,40}(?:from|at"
        r"|training).{0,160}?(?:iteration|step|checkpoint)[-_=: ]{0,4}(\d{1,15})"
    ),
)
_RESTARTED = re.compile(r"\brank \d{1,9} restarts as iteration \d{1,9}, \d{1,9}\.\d{1,9} s after: ")
"""As inprocess/engine.py logs it."""


@dataclass(frozen=True)
class Shape:
    """One way in which frameworks print a step."""

    name: str
    pattern: re.Pattern[str]
    """Groups: the step, and, before it, an epoch where it counts within one."""
    needs_loss: bool = False


SHAPES = (
    Shape("megatron", re.compile(r"\biteration\s{1,12}(?P<step>\d{1,15})/\s{0,12}\d")),
    Shape("deepspeed", re.compile(r"\bstep=(?P<step>\d{1,15}), skipped=")),
    Shape("maxtext", re.compile(r"completed step: (?P<step>\d{1,15})")),
    Shape("global_step", re.compile(r"\bglobal[_ ]step['\"]?\s{0,4}[=:]\s{0,4}(?P<step>\d{1,15})")),
    Shape(
        "tqdm",
        re.compile(
            r"(?:epoch (?P<epoch>\d{1,9})\b.{0,40})?\|\s{0,8}(?P<step>\d{1,15})/\d{1,15} "
            r"\[[\d:?]{1,12}<[\d:?, ]{1,16}"
            r".{0,12}(?:it/s|s/it)"
        ),
    ),
    Shape(
        "step",
        re.compile(
            r"\b(?:train(?:ing)?[_ ])?(?:step|iter|iteration|update)s?['\"]?\s{0,4}[=:#\[ "
            r"]\s{0,4}['\"]?(?P<step>\d{1,15})"
        ),
        needs_loss=True,
    ),
    Shape("trainer", re.compile(r"'loss': .{0,200}'epoch': '?(?P<epoch>\d{1,9})(?:\.(?P<step>\d{1,9}))?")),
)
_EPOCH = 10**12


@dataclass(frozen=True)
class Mark:
    """A place in training; two of one shape can be compared."""

    shape: str
    place: int
    step: int | None
    """None where the framework counts epochs only."""


@dataclass
class Progress:
    """What is known of an attempt's progress, and how often it has advanced."""

    advances: int = 0
    heals: int = 0
    """Restarts in process."""
    first_step: int | None = None
    last_step: int | None = None
    """Last step seen to be completed."""
    saved_step: int | None = None
    """Last checkpoint whose save was completed."""
    loaded_step: int | None = None
    last_line: int | None = None
    last_ts: float | None = None
    _places: dict[str, int] = field(default_factory=dict)
    _ranks: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """How much lies behind; what was found in an epoch two ago has been got over."""
        return self.advances + 2 * self.heals

    def see(self, mark: Mark, rank: int | None, line: int, ts: float | None) -> bool:
        """Take a mark; return whether training has advanced. Another rank's print of a step is no advance."""
        before = self._places.get(mark.shape)
        mine = self._ranks.get((mark.shape, rank or 0))
        if len(self._ranks) < 65536:
            self._ranks[mark.shape, rank or 0] = mark.place
        again = mine is not None and mark.place < mine  # started again from a checkpoint
        if before is not None and mark.place <= before and not again:
            return False
        self._places[mark.shape] = mark.place
        self.advances += 1
        self.last_line, self.last_ts = line, ts if ts is not None else self.last_ts
        if mark.step is not None:
            self.first_step = mark.step if self.first_step is None else self.first_step
            self.last_step = mark.step
        return True

    def saved(self, step: int, line: int, ts: float | None) -> None:
        """A checkpoint is complete: that is an advance too."""
        if self.saved_step is None or step > self.saved_step:
            self.advances += 1
            self.last_line, self.last_ts = line, ts if ts is not None else self.last_ts
        self.saved_step = step


def read_mark(text: str) -> Mark | None:
    """Return the training progress that a line in lower case tells, or None."""
    for shape in SHAPES:
        found = shape.pattern.search(text)
        if found is None or (shape.needs_loss and not _LOSS.search(text)):
            continue
        if shape.name in ("tqdm", "step") and _NOT_TRAINING.search(text[: found.start("step")]):
            continue
        groups = found.groupdict()
        inside, epoch = int(groups["step"] or 0), int(groups.get("epoch") or 0)
        if shape.name == "trainer":
            digits = (groups["step"] or "0").ljust(9, "0")
            return Mark(shape.name, epoch * _EPOCH + int(digits), None)
        return Mark(shape.name, epoch * _EPOCH + inside, None if groups.get("epoch") else inside)
    return None


def tells_restart(text: str) -> bool:
    """Tell whether a line in lower case says that its rank has restarted in its process."""
    return _RESTARTED.search(text) is not None


def read_saved(text: str) -> int | None:
    """Return the step of a checkpoint that a line in lower case says is complete, or None."""
    return _first(_SAVED, text) if "checkpoint" in text or "ckpt" in text else None


def read_loaded(text: str) -> int | None:
    """Return the step of a checkpoint that a line in lower case says was loaded, or None."""
    return _first(_LOADED, text) if "checkpoint" in text or "ckpt" in text or "resum" in text else None


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> int | None:
    if re.search(r"\bsaving\b|\bloading\b|fail|error|unable|could not", text):
        return None
    for pattern in patterns:
        found = pattern.search(text)
        if found:
            return int(found.group(1))
    return None
