"""Ports that the Mooncake library opens to everybody: kept to this host, or open because somebody said so."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores import bind_filter as listeners
from tidemill.kvstore.stores import mooncake_store
from tidemill.kvstore.stores.mooncake_store import SEGMENT_BYTES_MIN, Transport, lend_memory

EVERYBODY = "0.0.0.0"  # noqa: S104 - as the library has it


class NativeStore:
    """Listens as the library does."""

    def setup(self, *_: object) -> int:
        self.listener = socket.create_server((EVERYBODY, 0))
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
    """A kernel that wants CAP_NET_ADMIN, and a process without."""

    def refuse(*_: Any) -> None:  # noqa: ANN401 - a socket and a program
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listeners, "_attach", refuse)


@pytest.mark.usefixtures("refusing")
def test_open_mooncake_names_the_fix_when_ports_cannot_be_restricted(master: str) -> None:
    with pytest.raises(StoreError, match=r"CAP_NET_ADMIN.*ports=open"):
        lend_memory(master, SEGMENT_BYTES_MIN)


@pytest.mark.usefixtures("refusing")
def test_open_mooncake_opens_ports_on_request(master: str) -> None:
    lend_memory(master, SEGMENT_BYTES_MIN, transport=Transport(is_open=True))()


def test_open_mooncake_restricts_ports_where_possible(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[socket.socket] = []

    def keep(listener: socket.socket, program: object) -> None:
        del program
        kept.append(listener)

    monkeypatch.setattr(listeners, "_attach", keep)
    lend_memory(master, SEGMENT_BYTES_MIN, transport=Transport(is_open=True))()
    assert len(kept) == 1
