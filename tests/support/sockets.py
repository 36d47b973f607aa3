"""Connections of clients that do as tests say: send half of something, or never read."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from random import Random

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(url: str, receive_bytes: int | None = None) -> AsyncGenerator[Connection]:
    """`receive_bytes`: little, and what is not read makes the server wait soon."""
    host, _, port = url.removeprefix("http://").partition(":")
    one = socket.socket()
    if receive_bytes is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    one.setblocking(False)  # noqa: FBT003 - its only argument
    await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=one, limit=1 << 12)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def request_of(path: str, body: object, **headers: str) -> bytes:
    """Return a POST of JSON as a client writes it."""
    data = json.dumps(body).encode()
    about = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**about, **headers}.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port for a server that starts later, outside the range of outgoing connections."""
    for port in Random().sample(range(10_000, 20_000), 1_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise AssertionError("no port is free")


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes that arrive until the server closes or resets the connection."""
    received = bytearray()
    with suppress(ConnectionError, ssl.SSLError):
        while part := await reader.read(1 << 16):
            received += part
    return bytes(received)
