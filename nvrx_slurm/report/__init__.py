"""A job's journal as a report: a pure model, rich renderables, and the JSON document ``nvrx.report.v1``."""

from nvrx_slurm.report.build import build_report
from nvrx_slurm.report.document import SCHEMA, document
from nvrx_slurm.report.model import (
    AttemptReport,
    Cause,
    CycleEnd,
    CycleReport,
    HangFound,
    JobReport,
    JobState,
    Moment,
    MomentKind,
    NodeOut,
    Phase,
    ReadState,
    Recovery,
    RecoveryEnd,
    RequeueTaken,
    ResumeSource,
    SeenFault,
    Span,
    TimeShare,
    VerdictTaken,
)
from nvrx_slurm.report.render import render

__all__ = [
    "SCHEMA",
    "AttemptReport",
    "Cause",
    "CycleEnd",
    "CycleReport",
    "HangFound",
    "JobReport",
    "JobState",
    "Moment",
    "MomentKind",
    "NodeOut",
    "Phase",
    "ReadState",
    "Recovery",
    "RecoveryEnd",
    "RequeueTaken",
    "ResumeSource",
    "SeenFault",
    "Span",
    "TimeShare",
    "VerdictTaken",
    "build_report",
    "document",
    "render",
]
