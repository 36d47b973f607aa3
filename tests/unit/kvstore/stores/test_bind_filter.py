"""The ports of the Mooncake library: restricted to this host, or open on request."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores import bind_filter as listeners
from tidemill.kvstore.stores import mooncake_store
from tidemill.kvstore.stores.mooncake_store import SEGMENT_BYTES_MIN, Transport, lend_memory

ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - as the library listens


class NativeStore:
    """A fake that listens like the library."""

    def setup(self, *_: object) -> int:
        self.listener = socket.create_server((ANY_ADDRESS, 0))
        return 0

    def close(self) -> int:
        self.listener.close()
        return 0


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    library = SimpleNamespace(MooncakeDistributedStore=NativeStore)
    monkeypatch.setattr(mooncake_store, "load_library", lambda: library)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse filters, like a kernel that demands CAP_NET_ADMIN."""

    def refuse(*_: Any) -> None:  # noqa: ANN401 - a socket and a program
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listeners, "_attach", refuse)


@pytest.mark.usefixtures("refusing")
def test_lend_memory_names_the_fix_when_ports_cannot_be_restricted(master: str) -> None:
    with pytest.raises(StoreError, match=r"CAP_NET_ADMIN.*ports=open"):
        lend_memory(master, SEGMENT_BYTES_MIN)


@pytest.mark.usefixtures("refusing")
def test_lend_memory_leaves_ports_open_on_request(master: str) -> None:
    lend_memory(master, SEGMENT_BYTES_MIN, transport=Transport(is_open=True))()


def test_lend_memory_restricts_ports_where_possible(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filtered: list[socket.socket] = []

    def attach(listener: socket.socket, program: object) -> None:
        del program
        filtered.append(listener)

    monkeypatch.setattr(listeners, "_attach", attach)
    lend_memory(master, SEGMENT_BYTES_MIN, transport=Transport(is_open=True))()
    assert len(filtered) == 1
