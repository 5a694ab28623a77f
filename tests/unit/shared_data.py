"""Data that tests may read and the repository does not hold: ``shared/data`` beside the clone."""

from __future__ import annotations

from pathlib import Path


def shared_data(name: str) -> Path:
    """Return the path of one of its files or folders, which may not exist."""
    clone = Path(__file__).resolve().parents[2]
    places = [parent / "shared" / "data" / name for parent in clone.parents]
    return next((place for place in places if place.exists()), places[0])
