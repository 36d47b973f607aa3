"""The models that come with the package."""

from pathlib import Path


def bundled() -> dict[str, Path]:
    """Folder of each bundled model, by name."""
    return {"keeper": Path(__file__).resolve().parent / "keeper"}
