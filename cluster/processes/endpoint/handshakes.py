"""uvicorn's server behind our listener, which limits TLS handshakes and accepts many connections a turn."""

import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn

from tidemill.cluster.edge.http.connection import Connection
from tidemill.cluster.listener import HANDSHAKES_MAX, Handshakes, Listener


class EdgeServer(uvicorn.Server):
    """A uvicorn server on sockets that are given. Its protocol is a Connection. It leaves signals to us,
    because more must be stopped than it."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is in place of uvicorn's own settings."""
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        protocol = cast("type[Connection]", self.config.http_protocol_class)
        create = partial(protocol, self.config, self.server_state, self.lifespan.state)
        places = Handshakes(HANDSHAKES_MAX)
        for listener in sockets or ():
            server = Listener(listener, self._tls, create, protocol.places, places)
            self.servers.append(server)  # pyrefly: ignore[bad-argument-type]  only two methods are used

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
