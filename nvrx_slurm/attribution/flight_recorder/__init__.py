"""Flight Recorder dumps of a stall: which rank everybody waits for, and what it was doing."""

from nvrx_slurm.attribution.flight_recorder.load import DumpError
from nvrx_slurm.attribution.flight_recorder.read import Dumps, Manifest, find_dumps, read_dump, read_dumps
from nvrx_slurm.attribution.flight_recorder.report import (
    CulpritClass,
    FlightReport,
    Place,
    RankCulprit,
    analyze,
    analyze_directory,
)

__all__ = [
    "CulpritClass",
    "DumpError",
    "Dumps",
    "FlightReport",
    "Manifest",
    "Place",
    "RankCulprit",
    "analyze",
    "analyze_directory",
    "find_dumps",
    "read_dump",
    "read_dumps",
]
