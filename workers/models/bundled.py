"""The models in the package."""

from pathlib import Path


def bundled() -> dict[str, Path]:
    """Return the folder of each bundled model, by name."""
    return {"keeper": Path(__file__).resolve().parent / "keeper"}
