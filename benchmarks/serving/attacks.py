"""Attacks of a client on a server, as a table: bodies that cost much, and floods of connections and bytes.

python -m benchmarks.serving.attacks URL NAME

Runs one attack from a loopback address of its own, and prints the statuses of its answers as JSON.
benchmarks.serving.abuse runs each of them beside streams of a well-behaved client.
"""

import argparse
import asyncio
import json
import socket
import ssl
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

MIB = 1 << 20
BODY_BYTES = 4 * MIB - 4096
SOURCE = "127.0.0.2"
"""Limits are shared by address: the attacker has another one than the well-behaved client."""

ATTACK_S_MAX = 25.0
WAIT_S_MAX = 60.0

Kind = Literal["body", "flood", "reset"]
Statuses = Counter[str]


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int
    tls: ssl.SSLContext | None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            self.host, self.port, ssl=self.tls, local_addr=(SOURCE, 0), limit=1 << 20
        )


@dataclass(frozen=True, slots=True)
class Attack:
    """One row. `build` makes what is sent, before the clock runs, and returns what sends it."""

    name: str
    kind: Kind
    build: Callable[[], Callable[[Target], Awaitable[Statuses]]]


def head(method: str, path: str, *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/{version}", "Host: localhost", *lines, "", "")).encode()


def post(path: str, body: bytes, version: str = "1.1") -> bytes:
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    return head("POST", path, *lines, version=version) + body


async def status_of(reader: asyncio.StreamReader) -> str:
    """Return the status of the answer; "cut" if the connection ends without one."""
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            line = await reader.readline()
    except TimeoutError:
        return "silence"
    except (OSError, ValueError):
        return "cut"
    return line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "cut"


async def whole(target: Target, request: bytes) -> str:
    """Send a request and return the status of its answer, which is read to its end or for a while."""
    try:
        reader, writer = await target.connect()
    except OSError:
        return "refused"
    with suppress(OSError):
        writer.write(request)
        await writer.drain()
    status = await status_of(reader)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(0.5):
            while await reader.read(MIB):
                pass
    writer.close()
    return status


async def all_of(target: Target, requests: list[bytes]) -> Statuses:
    return Counter(await asyncio.gather(*(whole(target, request) for request in requests)))


def body(path: str, make: Callable[[], object], times: int = 1) -> Callable[[], Callable[[Target], Any]]:
    """Return the builder of `times` concurrent requests with one body."""

    def build() -> Callable[[Target], Awaitable[Statuses]]:
        made = make()
        raw = made if isinstance(made, bytes) else json.dumps(made, separators=(",", ":")).encode()
        return partial(all_of, requests=[post(path, raw)] * times)

    return build


async def poured(target: Target, opening: bytes, piece: bytes, num_bytes: int) -> str:
    """Send `piece` again and again; return "cut" or the status once the server refuses more."""
    try:
        reader, writer = await target.connect()
    except OSError:
        return "refused"
    sent = 0
    try:
        writer.write(opening)
        while sent < num_bytes and not reader.at_eof():
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except OSError:
        pass
    with suppress(OSError):
        writer.write_eof() if writer.can_write_eof() else None
    status = await status_of(reader)
    writer.transport.abort()
    return status


def pouring(
    opening: bytes, piece: bytes, num_bytes: int, connections: int
) -> Callable[[], Callable[[Target], Awaitable[Statuses]]]:
    async def send(target: Target) -> Statuses:
        work = (poured(target, opening, piece, num_bytes) for _ in range(connections))
        return Counter(await asyncio.gather(*work))

    return lambda: send


async def held(target: Target, request: bytes, connections: int, seconds: float, *, abort: bool) -> Statuses:
    """Send a request on each connection and keep it open, or reset it immediately."""
    found = Statuses()
    writers: list[asyncio.StreamWriter] = []
    for index in range(connections):
        try:
            _, writer = await target.connect()
        except OSError:
            found["refused"] += 1
            continue
        with suppress(OSError):
            writer.write(request)
        if abort:
            await asyncio.sleep(0)
            writer.transport.abort()
        else:
            writers.append(writer)
        if index % 64 == 63:
            await asyncio.sleep(0.001)
    await asyncio.sleep(seconds)
    found["held"] += len(writers)
    for writer in writers:
        writer.transport.abort()
    return found


def holding(
    request: bytes, connections: int, seconds: float = 5.0, *, abort: bool = False
) -> Callable[[], Callable[[Target], Awaitable[Statuses]]]:
    return lambda: partial(held, request=request, connections=connections, seconds=seconds, abort=abort)


async def reset(target: Target, request: bytes, per_s: int, seconds: float = 5.0) -> Statuses:
    """Open `per_s` connections a second, and reset each when the request was sent."""
    loop, found = asyncio.get_running_loop(), Statuses()
    began_s = loop.time()
    for index in range(int(per_s * seconds)):
        with socket.socket() as connecting:
            connecting.settimeout(0.0)
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                connecting.bind((SOURCE, 0))
                await loop.sock_connect(connecting, (target.host, target.port))
                await loop.sock_sendall(connecting, request)
                found["reset"] += 1
            except OSError:
                found["refused"] += 1
        await asyncio.sleep(max(0.0, began_s + index / per_s - loop.time()))
    return found


async def trickled(target: Target, opening: bytes, piece: bytes, connections: int) -> Statuses:
    """Send a byte or so each 0.1 s on many connections."""
    writers = [(await target.connect())[1] for _ in range(connections)]
    for writer in writers:
        writer.write(opening)
    for _ in range(50):
        for writer in writers:
            if not writer.is_closing():
                writer.write(piece)
        await asyncio.sleep(0.1)
    for writer in writers:
        writer.transport.abort()
    return Counter(held=connections)


async def half_shaken(target: Target, connections: int) -> Statuses:
    """Open connections that send the first bytes of a TLS handshake and nothing more."""
    return await held(
        Target(target.host, target.port, None), b"\x16\x03\x01\x02\x00\x01\x00", connections, 5.0, abort=False
    )


def text_of(num_bytes: int) -> str:
    return ("Emma is in the tower. " * (num_bytes // 22 + 1))[:num_bytes]


def chat(messages: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    return {"model": "keeper", "messages": messages, "max_tokens": 1, **more}


def completion(**more: object) -> dict[str, Any]:
    return {"model": "keeper", "prompt": "a", "max_tokens": 1, **more}


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def tool(at: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object"}}}


def schema(properties: int) -> dict[str, Any]:
    entries = {f"property_{at:06}": {"type": "string", "maxLength": 5} for at in range(properties)}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {"properties": entries}}}


COMPLETIONS, CHATS, TOKENS = "/v1/completions", "/v1/chat/completions", "/tokenize"
LONG_TEXT = partial(text_of, BODY_BYTES - 200)

BODIES: tuple[tuple[str, str, Callable[[], object], int], ...] = (
    ("text of 4 MiB, completion", COMPLETIONS, lambda: completion(prompt=LONG_TEXT()), 1),
    ("text of 4 MiB, completion, 8 times", COMPLETIONS, lambda: completion(prompt=LONG_TEXT()), 8),
    ("text of 4 MiB, chat", CHATS, lambda: chat([user(LONG_TEXT())]), 1),
    ("text that just fits, chat, 4 times", CHATS, lambda: chat([user("a " * 60_000)]), 4),
    ("control tokens, chat", CHATS, lambda: chat([user("<|user|>" * 12_000)]), 4),
    ("heads of control tokens, chat", CHATS, lambda: chat([user("<|" * 50_000)]), 4),
    ("127,000 messages", CHATS, lambda: chat([user("a")] * 127_000), 1),
    ("4,096 messages, 4 times", CHATS, lambda: chat([user("a")] * 4096), 4),
    ("text of 4 MiB, tokenize", TOKENS, lambda: {"prompt": LONG_TEXT(), "return_token_strs": True}, 1),
    (
        "text of 96 KiB, tokenize, 6 times",
        TOKENS,
        lambda: {"prompt": "a" * 98_000, "return_token_strs": True},
        6,
    ),
    ("1.3 million tokens, detokenize", "/detokenize", lambda: {"tokens": [70] * 1_300_000}, 1),
    ("260,000 tokens, detokenize, 4 times", "/detokenize", lambda: {"tokens": [70] * 260_000}, 4),
    ("1 million tokens", COMPLETIONS, lambda: completion(prompt=[70] * 1_000_000), 1),
    ("260,000 tokens, 4 times", COMPLETIONS, lambda: completion(prompt=[70] * 260_000), 4),
    ("100,000 stop strings", COMPLETIONS, lambda: completion(stop=["abc"] * 100_000), 1),
    ("250,000 biases", COMPLETIONS, lambda: completion(logit_bias={str(at): 1 for at in range(250_000)}), 1),
    ("32,000 biases", COMPLETIONS, lambda: completion(logit_bias={str(at): 1 for at in range(32_000)}), 4),
    ("2 million levels", COMPLETIONS, lambda: b'{"prompt":' + b"[" * (BODY_BYTES - 100), 1),
    ("a number of 4 MiB", COMPLETIONS, lambda: b'{"prompt":"a","n":' + b"9" * (BODY_BYTES - 100) + b"}", 1),
    ("60,000 huge numbers", COMPLETIONS, lambda: completion(prompt=[10**60] * 60_000), 1),
    ("330,000 unknown fields", COMPLETIONS, lambda: completion(**{f"x{at}": 1 for at in range(330_000)}), 1),
    (
        "32,000 unknown fields, 4 times",
        COMPLETIONS,
        lambda: completion(**{f"x{at}": 1 for at in range(32_000)}),
        4,
    ),
    ("schema of 3.6 MB", CHATS, lambda: chat([user("a")], response_format=schema(60_000)), 1),
    ("schema of 1.9 MB", CHATS, lambda: chat([user("a")], response_format=schema(32_000)), 2),
    ("40,000 tools", CHATS, lambda: chat([user("a")], tools=[tool(at) for at in range(40_000)]), 1),
    (
        "a tool of 4 MiB, 4 times",
        CHATS,
        lambda: chat(
            [user("a")], tools=[{"type": "function", "function": {"name": "f", "description": LONG_TEXT()}}]
        ),
        4,
    ),
    (
        "arguments of 3 MB",
        CHATS,
        lambda: chat(
            [user("a"), {"role": "assistant", "tool_calls": [call(json.dumps({"a": [0] * 1_000_000}))]}]
        ),
        1,
    ),
    (
        "100,000 lists in arguments",
        CHATS,
        lambda: chat(
            [user("a"), {"role": "assistant", "tool_calls": [call('{"a":[' + "[]," * 100_000 + "0]}")]}]
        ),
        2,
    ),
    ("150,000 parts", CHATS, lambda: chat([user([{"type": "text", "text": ""}] * 150_000)]), 1),
    ("65,000 parts", CHATS, lambda: chat([user([{"type": "text", "text": ""}] * 65_000)]), 2),
    (
        "110,000 items",
        "/v1/responses",
        lambda: {"model": "keeper", "input": [user("a")] * 110_000, "max_output_tokens": 1},
        1,
    ),
    (
        "quotes and backslashes",
        COMPLETIONS,
        lambda: b'{"prompt":"' + b'\\"' * (BODY_BYTES // 2 - 100) + b'"}',
        2,
    ),
    (
        "escaped surrogates",
        COMPLETIONS,
        lambda: b'{"prompt":"' + b"\\ud83d" * (BODY_BYTES // 6 - 99) + b'"}',
        2,
    ),
    ("bytes that are no JSON", COMPLETIONS, lambda: b"\x00\xff" * (BODY_BYTES // 2), 2),
)
"""Name, path, body, and the number of concurrent requests with it."""

PING = head("GET", "/ping")
SILENT = head("POST", COMPLETIONS, "Content-Type: application/json", "Content-Length: 10")
STREAM = post(
    COMPLETIONS,
    json.dumps(
        completion(prompt=[70] * 8, max_tokens=400, stream=True, ignore_eos=True, logprobs=5)
    ).encode(),
)
CHUNKED = head("POST", COMPLETIONS, "Content-Type: application/json", "Transfer-Encoding: chunked")

FLOODS: tuple[Attack, ...] = (
    Attack(
        "headers without end", "flood", pouring(b"GET /ping HTTP/1.1\r\n", b"a: b\r\n" * 4096, 50 * MIB, 8)
    ),
    Attack("a header without end", "flood", pouring(b"GET /ping HTTP/1.1\r\na: ", b"b" * 16384, 50 * MIB, 8)),
    Attack("a URL without end", "flood", pouring(b"GET /", b"b" * 16384, 50 * MIB, 8)),
    Attack(
        "trailers without end",
        "flood",
        pouring(CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 4096, 50 * MIB, 8),
    ),
    Attack("chunk extensions", "flood", pouring(CHUNKED, b"1;" + b"x" * 8000 + b"\r\n{\r\n", 8 * MIB, 8)),
    Attack("chunks of one byte", "flood", pouring(CHUNKED, b"1\r\n{\r\n" * 1024, 8 * MIB, 4)),
    Attack("pipelined pings", "flood", pouring(b"", PING * 512, 8 * MIB, 4)),
    Attack("pipelined scrapes", "flood", pouring(b"", head("GET", "/metrics") * 64, 2 * MIB, 4)),
    Attack("pipelined bodies", "flood", pouring(b"", post(COMPLETIONS, b" " * MIB), 64 * MIB, 4)),
    Attack(
        "a body of 100 MiB",
        "flood",
        pouring(head("POST", COMPLETIONS, f"Content-Length: {100 * MIB}"), b" " * 65536, 100 * MIB, 4),
    ),
    Attack("2,048 missing bodies", "flood", holding(SILENT, 2048)),
    Attack(
        "64 bodies of almost 4 MiB",
        "flood",
        holding(post(COMPLETIONS, b" " * BODY_BYTES)[:-1], 64),
    ),
    Attack("260 small bodies that wait", "flood", holding(SILENT, 260)),
    Attack("1,500 idle connections", "flood", holding(b"", 1500)),
    Attack("1,500 connections, HTTP/1.0", "flood", holding(head("GET", "/ping", version="1.0"), 1500)),
    Attack("1,000 resets of streams", "flood", holding(STREAM, 1000, 1.0, abort=True)),
    Attack("40 streams that nobody reads", "flood", holding(STREAM, 40, 8.0)),
    Attack(
        "slow headers",
        "flood",
        lambda: partial(trickled, opening=b"GET /ping HTTP/1.1\r\n", piece=b"a: b\r\n", connections=300),
    ),
    Attack(
        "slow bodies",
        "flood",
        lambda: partial(trickled, opening=SILENT.replace(b": 10", b": 999"), piece=b" ", connections=300),
    ),
    Attack("1,000 bodies of 9 KiB", "flood", body(COMPLETIONS, lambda: completion(prompt=[70] * 3000), 1000)),
    Attack("half a TLS handshake", "flood", lambda: partial(half_shaken, connections=1500)),
    Attack(
        "requests of HTTP/1.0",
        "flood",
        lambda: partial(all_of, requests=[head("GET", "/ping", version="1.0")] * 500),
    ),
)

RESETS = tuple(
    Attack(f"2,100 resets a second{after}", "reset", partial(partial, reset, request=request, per_s=2100))
    for after, request in (("", b""), (" after a ping", PING), (" after a chat", STREAM))
)

ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        *(Attack(name, "body", body(path, make, times)) for name, path, make, times in BODIES),
        *FLOODS,
        *RESETS,
    )
}


def target_of(url: str) -> Target:
    parts = urlsplit(url)
    tls = None
    if parts.scheme == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return Target(parts.hostname or "", parts.port or 0, tls)


async def run(target: Target, send: Callable[[Target], Awaitable[Statuses]]) -> Statuses:
    try:
        async with asyncio.timeout(ATTACK_S_MAX):
            return await send(target)
    except TimeoutError:
        return Counter(unfinished=1)


def main(attacks: Mapping[str, Attack], prepare: Callable[[ssl.SSLContext | None], None]) -> None:
    """Run the attack that the command line names; `prepare` changes the context of TLS."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name", choices=attacks)
    options = parser.parse_args()
    send = attacks[options.name].build()
    print("built", flush=True)
    sys.stdin.readline()
    target = target_of(options.url)
    prepare(target.tls)
    print(json.dumps(asyncio.run(run(target, send))), flush=True)


if __name__ == "__main__":
    main(ATTACKS, lambda _: None)
