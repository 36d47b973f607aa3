"""Settings of an engine of the bundled model, which keeps nothing in a store."""

from pathlib import Path

from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled


def keeper_settings(**changes: object) -> EngineSettings:
    values = {
        "model_folder": bundled()["keeper"],
        "cache_folder": Path("nowhere"),
        "store_url": "memory:?size=0",
        **changes,
    }
    return EngineSettings(**values)  # pyright: ignore[reportArgumentType]  named by the tests
