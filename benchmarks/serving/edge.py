"""CPU time of the HTTP edge beside a bare uvicorn app that sends the same bytes, in the same run; no engine.

python -m benchmarks.serving.edge

The service behind the edge has its tokens ready. Each server is a process of its own, whose CPU time is what
counts: per request, per streamed token, with several choices, and over TLS. Then tokenization, by itself.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import trustme
import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.support.cluster.fake_service import FakeService, app_over, tokenizer

from tidemill.cluster.edge.http.connection import with_limits
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.security import Tls, tls_context
from tidemill.cluster.processes.endpoint.handshakes import EdgeServer

RESULT = Path(__file__).parents[1] / "results" / "edge.json"
PATH = "/v1/completions"
TOKENS = 200
WIDTH = 32
TEXT = "Emma is in the tower. The code of Tina is 6869. "

BODIES: dict[str, dict[str, Any]] = {
    "request": {"prompt": TEXT, "max_tokens": 1},
    "stream": {"prompt": TEXT, "max_tokens": TOKENS, "stream": True},
    "4 choices": {"prompt": TEXT, "max_tokens": TOKENS // 4, "stream": True, "n": 4},
    "logprobs": {"prompt": TEXT, "max_tokens": TOKENS, "stream": True, "logprobs": 5},
}


def edge() -> ASGIApp:
    tokens = tokenizer().encode(TEXT * 50)
    service = FakeService(lambda _: tokens)
    service.model = replace(service.model, max_model_len=1 << 16)
    return app_over(service)


async def recorded(app: ASGIApp, body: dict[str, Any]) -> list[bytes]:
    """The pieces of a reply's body as the application hands them out."""
    parts: list[bytes] = []
    data = json.dumps(body).encode()
    messages = iter([{"type": "http.request", "body": data}])

    async def receive() -> Any:  # noqa: ANN401 - as ASGI has it
        try:
            return next(messages)
        except StopIteration:
            return await asyncio.Event().wait()

    async def send(message: Any) -> None:  # noqa: ANN401 - the same
        parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
    await app({**scope, "http_version": "1.1", "server": ("a", 1), "client": ("a", 2)}, receive, send)
    return [part for part in parts if part]


async def bare() -> ASGIApp:
    """Reads a body and sends what the edge would send, frame by frame."""
    replies = {json.dumps(body): await recorded(edge(), body) for body in BODIES.values()}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        asked = b""
        more = True
        while more:
            message = await receive()
            asked += message.get("body", b"")
            more = message.get("more_body", False)
        frames = replies[json.dumps(json.loads(asked))]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for frame in frames:
            await asyncio.sleep(0)  # as the service does
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def serve(kind: str, listener: socket.socket, tls: Tls | None) -> None:
    app = edge() if kind == "edge" else await bare()
    is_edge = kind == "edge"
    files = {} if is_edge or tls is None else {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    config = uvicorn.Config(
        app,
        http=with_limits(EdgeLimits()) if is_edge else "httptools",
        log_level="critical",
        lifespan="off",
        timeout_keep_alive=600,  # nothing is closed under a client that a busy machine holds up
        **files,
    )
    server = EdgeServer(config, tls_context(tls)) if is_edge else uvicorn.Server(config)
    await server.serve(sockets=[listener])


@contextmanager
def server(kind: str, folder: Path, *, tls: bool) -> Generator[tuple[str, psutil.Process]]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        words = ["--serve", kind, "--listener", str(listener.fileno()), *(["--tls", str(folder)] * tls)]
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "benchmarks.serving.edge", *words], pass_fds=[listener.fileno()]
        )
        try:
            scheme = "https" if tls else "http"
            yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


async def cpu_us(url: str, process: psutil.Process, folder: Path, name: str, count: int) -> float:
    """CPU microseconds of the server for each of `count` calls."""
    body = json.dumps(BODIES[name]).encode()
    headers = {"content-type": "application/json"}
    verify = str(folder / "ca.pem") if url.startswith("https") else False
    async with httpx.AsyncClient(base_url=url, verify=verify, timeout=600, trust_env=False) as client:

        async def calls(number: int) -> None:
            for _ in range(number):
                reply = await client.post(PATH, content=body, headers=headers)
                assert reply.status_code == 200

        await asyncio.gather(*(calls(2) for _ in range(WIDTH)))  # connections, caches
        before = process.cpu_times()
        await asyncio.gather(*(calls(count // WIDTH) for _ in range(WIDTH)))
        after = process.cpu_times()
    spent_s = after.user + after.system - before.user - before.system
    return 1e6 * spent_s / (count // WIDTH * WIDTH)


def measure(folder: Path, requests: int, streams: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for tls in (False, True):
        for kind in ("bare", "edge"):
            with server(kind, folder, tls=tls) as (url, process):
                for name in BODIES:
                    count = requests if name == "request" else streams
                    per_call_us = asyncio.run(cpu_us(url, process, folder, name, count))
                    each = 1 if name == "request" else TOKENS
                    row = rows.setdefault(f"{name}{', TLS' if tls else ''}", {})
                    row[f"{kind}_us"] = per_call_us / each
                    print(kind, name, "TLS" * tls, round(per_call_us / each, 1), "us", flush=True)
    for row in rows.values():
        row["ratio"] = row["edge_us"] / row["bare_us"]
    return rows


def tokenization() -> dict[str, float]:
    """Microseconds per token, of text in and of tokens out."""
    costs: dict[str, float] = {}
    for num_chars in (500, 50_000):
        text = (TEXT * (num_chars // len(TEXT) + 1))[:num_chars]
        tokens = tokenizer().encode(text)
        rounds = 200_000 // num_chars
        began_s = time.process_time()
        for _ in range(rounds):
            tokenizer().encode(text)
        spent_s = time.process_time() - began_s
        costs[f"encode, {num_chars} characters"] = 1e6 * spent_s / rounds / len(tokens)
    decoder = tokenizer().decoder()
    began_s = time.process_time()
    for token in tokens:
        decoder.push(token)
    costs["decode, token by token"] = 1e6 * (time.process_time() - began_s) / len(tokens)
    return costs


def certificates(folder: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=3200)
    options.add_argument("--streams", type=int, default=320)
    options.add_argument("--serve", choices=["edge", "bare"], help=argparse.SUPPRESS)
    options.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    options.add_argument("--tls", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.serve:
        tls = chosen.tls and Tls(certificate=chosen.tls / "cert.pem", key=chosen.tls / "key.pem")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(chosen.serve, socket.socket(fileno=chosen.listener), tls))
        return
    with tempfile.TemporaryDirectory(prefix="edge-") as scratch:
        certificates(Path(scratch))
        figures = {
            **measure(Path(scratch), chosen.requests, chosen.streams),
            "tokenization_us": tokenization(),
        }
    print(json.dumps(figures, indent=2))
    RESULT.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
