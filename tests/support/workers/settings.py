"""Settings of an engine that keeps nothing in a store, unless they name one."""

from pathlib import Path
from typing import Any

from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled


def plain_settings(
    model_folder: Path | None = None,
    cache_folder: Path = Path("nowhere"),
    memory_bytes: int | None = None,
    **more: Any,  # noqa: ANN401  settings by name
) -> EngineSettings:
    """Return the settings of a model, of the bundled one if none is given."""
    given: dict[str, Any] = {"store_url": "memory:?size=0", "memory_bytes": memory_bytes, **more}
    return EngineSettings(
        model_folder=model_folder or bundled()["keeper"], cache_folder=cache_folder, **given
    )
