"""The subscriber in docs/kv_events.md, as a module."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol

PAGE = Path(__file__).parents[3] / "docs/kv_events.md"


class Mirror(Protocol):
    """The mirror of docs/kv_events.md."""

    pages: dict[bytes, tuple[bytes | None, list[int]]]
    restorable: set[bytes]


class Subscriber(Protocol):
    """The subscriber of docs/kv_events.md."""

    mirror: Mirror

    def receive(self, timeout_ms: int) -> bool: ...
    def close(self) -> None: ...


def documented_subscriber() -> ModuleType:
    """Return the code of the page as a module."""
    _, _, code = PAGE.read_text().partition("```python\n")
    module = ModuleType("subscriber")
    sys.modules["subscriber"] = module  # msgspec looks its annotations up there
    exec(compile(code.partition("```")[0], str(PAGE), "exec"), module.__dict__)  # noqa: S102 - ours
    return module
