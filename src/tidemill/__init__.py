"""Tidemill: serving hybrid language models on Ray, with prefill and decode on separate workers.

`LLM` and `SamplingParams` answer prompts offline; they are imported when they are used, and torch with them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.cluster.edge.chat.request.params import SamplingParams
    from tidemill.cluster.offline.llm import LLM

__version__: str
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    match name:
        case "LLM":
            from tidemill.cluster.offline.llm import LLM  # noqa: PLC0415 - `import tidemill` must not wait for torch

            return LLM
        case "SamplingParams":
            from tidemill.cluster.edge.chat.request.params import SamplingParams  # noqa: PLC0415 - nor for pydantic

            return SamplingParams
        case "__version__":
            from importlib import metadata  # noqa: PLC0415 - a folder on the path of another engine has none

            return metadata.version("tidemill")
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
