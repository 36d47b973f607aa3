"""uvicorn's server behind the listener that limits TLS handshakes."""

import socket
import ssl
from functools import partial
from typing import cast

import uvicorn

from tidemill.cluster.edge.http.connection import Connection
from tidemill.cluster.edge.requests.security import HANDSHAKES_MAX, Handshakes, Listener


class EdgeServer(uvicorn.Server):
    """A uvicorn server whose TLS handshakes are limited. Its protocol is a Connection."""

    def __init__(
        self, config: uvicorn.Config, tls: ssl.SSLContext | None = None, *, handed: bool = False
    ) -> None:
        """`tls` is in place of uvicorn's own settings. Connections of `handed` sockets are those that the
        server process has accepted."""
        super().__init__(config)
        self._tls = tls
        self._handed = handed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None and not self._handed:
            await super().startup(sockets)
            return
        await super().startup([])
        protocol = cast("type[Connection]", self.config.http_protocol_class)
        create = partial(protocol, self.config, self.server_state, self.lifespan.state)
        places = Handshakes(HANDSHAKES_MAX)
        for listener in sockets or ():
            server = Listener(listener, self._tls, create, protocol.places, places)
            self.servers.append(server)  # pyright: ignore[reportArgumentType] - only two methods are used
