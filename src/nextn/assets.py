"""Files that ship inside the package."""

from __future__ import annotations

from pathlib import Path

from nextn.errors import NextnError


def embedded_model() -> Path:
    """Folder of the embedded model.

    Raises:
        NextnError: this installation does not carry it.
    """
    folder = Path(__file__).parent / "tiny"
    if not (folder / "config.json").is_file():
        raise NextnError("This installation carries no embedded model.", "Name a checkpoint instead.")
    return folder
