"""What one engine is made of: plain data, read once, without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.layout import KvDtype


class SettingsError(TidemillError):
    """A setting has no meaning; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What one engine is made of. `step_tokens_max` is the token budget of a step, `rows_max` its rows."""

    model_folder: Path
    memory_bytes: int
    store_url: str
    cache_folder: Path  # where compiled kernels are kept
    page_tokens: int = 64
    kv_dtype: KvDtype = "float32"
    backing: Literal["fixed", "mmap"] = "mmap"
    kernels: Literal["cpu", "reference"] = "cpu"
    threads: int = 1
    step_tokens_max: int = 512
    rows_max: int = 64
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Raises SettingsError."""
        for flag, value in (
            ("--page-size", self.page_tokens),
            ("--threads", self.threads),
            ("--max-num-batched-tokens", self.step_tokens_max),
            ("--max-num-seqs", self.rows_max),
            ("--max-model-len", self.max_model_len),
        ):
            if value is not None and value < 1:
                raise SettingsError(f"{flag} is {value}: set it to 1 or more")
