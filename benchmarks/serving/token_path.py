"""CPU time of the edge per streamed token and per request, from a worker's frames to the client's sockets.

python -m benchmarks.serving.token_path [--streams 64] [--runs 3] [--edges 4] [--profile FOLDER]

The worker has a process of its own: the real server with an engine that only emits a token per step for each
stream. The edge has another: the real HTTP server, flow and gRPC client, without Ray. Three scopes: gRPC in
the clear, gRPC with mutual TLS, and deltas that the edge's own process makes, as if their frames were
decoded. A token's cost is the difference between long and short answers, and a request's that of an answer of
one token without the token. The router makes no decision. `--profile` runs the edge under cProfile,
which makes it slower, and keeps a file per scope. `--edges 4` measures one edge and four beside each other,
each with as many streams and all with one worker, and prints how many single edges the four are worth.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import trustme
import uvicorn
import uvloop
from tests.support.cluster.fake_service import FakeService, app_over, tokenizer

from benchmarks.peers.cpu import cpu_name
from tidemill.cluster.edge.flow import WorkerStreams, serve
from tidemill.cluster.edge.http.connection import with_limits
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.cluster.processes.endpoint.handshakes import EdgeServer
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.worker.server import WorkerServer
from tidemill.kvstore.keys import PageKey
from tidemill.workers.inbox import Emit, Inbox, Pause, done
from tidemill.workers.messages import Delta, EngineInfo, Produced, Provenance, Request, StreamPiece, WorkerId
from tidemill.workers.scheduling.isolation import Notify

RESULT = Path(__file__).parents[1] / "results" / "token_path.json"
WORKER = WorkerId("mixed-0.a")
STEP_S = 0.02
PAGE_TOKENS = 16
PROMPT = "Emma is in the tower. The code of Tina is 6869. "
SHORT_TOKENS, LONG_TOKENS = 10, 210
REQUESTS_PER_STREAM = 10
SCOPES = ("grpc", "grpc with mutual TLS", "decoded")


class SteppedEngine:
    """An engine without a model: every STEP_S each of its calls gets its next token."""

    def __init__(self) -> None:
        self._tokens = tokenizer().encode(PROMPT)
        self._calls = dict[Inbox[Delta], tuple[bool, int]]()  # before its first token, tokens left

    async def steps(self) -> None:
        loop = asyncio.get_running_loop()
        began_s, step = loop.time(), 0
        while True:
            step += 1
            await asyncio.sleep(began_s + step * STEP_S - loop.time())
            token = self._tokens[step % len(self._tokens)]
            for call in list(self._calls):
                self._give(call, token)

    def _give(self, call: Inbox[Delta], token: int) -> None:
        is_first, left = self._calls[call]
        self._calls[call] = (False, left - 1)
        if left == 1:
            del self._calls[call]
        call.put(
            Delta(
                tokens=(token,),
                finish="length" if left == 1 else None,
                provenance=Provenance() if is_first else None,
            )
        )

    async def stream(self, request: Request, emit: Emit[Delta], notify: Notify | None = None) -> None:
        del notify
        call = Inbox[Delta]()
        self._calls[call] = (True, request.max_new_tokens)

        def take(delta: Delta) -> Pause | None:
            pause = emit(delta)
            return pause if delta.finish is None else done

        try:
            await call.read(take)
        finally:
            self._calls.pop(call, None)

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        raise NotImplementedError("the only worker is mixed")

    async def prefetch(self, request: Request) -> Produced:
        raise NotImplementedError("the only worker is mixed")

    def release(self, tenant: str, name: str) -> None:
        raise NotImplementedError("nothing is retained")


class DecodedStreams:
    """The engine as the workers of a fleet."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine

    async def stream(self, worker: WorkerId, address: str, request: Request, emit: Emit[Delta]) -> None:
        del worker, address
        await self._engine.stream(request, emit)

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        raise NotImplementedError("the only worker is mixed")

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        raise NotImplementedError("the only worker is mixed")


class OneWorker:
    """A router without a choice."""

    def __init__(self, address: str) -> None:
        self._route = Route(decode=WORKER, decode_address=address)

    async def place(self, request: PlacementRequest) -> Route:
        del request
        return self._route

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        del blamed
        raise SystemExit(f"the edge lost {worker}")


class OneWorkerService(FakeService):
    """The flow over one worker."""

    def __init__(self, streams: WorkerStreams, address: str) -> None:
        super().__init__(lambda _: [])
        self.model = replace(self.model, max_model_len=1 << 16)
        self._streams = streams
        self._router = OneWorker(address)

    async def stream(self, request: Request, emit: Emit[StreamPiece]) -> None:
        root = PageKey(bytes(32))
        await serve(
            request, self._router, self._streams, lambda _: root, EngineInfo(page_tokens=PAGE_TOKENS), emit
        )


def tls_in(folder: Path) -> MutualTls:
    return MutualTls(certificate=folder / "cert.pem", key=folder / "key.pem", ca=folder / "ca.pem")


def write_certificates(tls: MutualTls) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tls.ca))
    issued = authority.issue_cert(CLUSTER_NAME)
    issued.private_key_pem.write_to_path(str(tls.key))
    issued.cert_chain_pems[0].write_to_path(str(tls.certificate))


async def run_worker(tls: MutualTls | None) -> None:
    engine = SteppedEngine()
    server = WorkerServer(engine, WORKER, tls=tls)
    print(await server.start("127.0.0.1"), flush=True)
    await engine.steps()


async def run_edge(listener: socket.socket, address: str, tls: MutualTls | None) -> None:
    engine = SteppedEngine()
    stepping = None if address else asyncio.create_task(engine.steps())
    streams = WorkerClients(tls=tls) if address else DecodedStreams(engine)
    app = app_over(OneWorkerService(streams, address))
    config = uvicorn.Config(app, http=with_limits(EdgeLimits()), log_level="critical", lifespan="off")
    gc.freeze()  # as the real edge
    try:
        await EdgeServer(config, None).serve(sockets=[listener])
    finally:
        if stepping is not None:
            stepping.cancel()


@contextmanager
def process(*words: str, **options: Any) -> Generator[subprocess.Popen[str]]:  # noqa: ANN401  of Popen
    command = [sys.executable, "-m", "benchmarks.serving.token_path", *words]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # noqa: S603  our own
    try:
        yield started
    finally:
        started.terminate()
        started.wait()


@contextmanager
def edges_of(
    scope: str, folder: Path, profile: Path | None = None, count: int = 1
) -> Generator[list[tuple[int, psutil.Process]]]:
    """Start edges, and their worker if the scope has one. Yield the port and process of each edge."""
    flags = ["--tls", str(folder)] if "TLS" in scope else []
    with ExitStack() as stack:
        address = ""
        if scope != "decoded":
            worker = stack.enter_context(process("--role", "worker", *flags))
            assert worker.stdout is not None
            address = worker.stdout.readline().strip()
        if profile is not None:
            flags += ["--profile", str(profile / f"{scope.replace(' ', '-')}.prof")]
        started: list[tuple[int, psutil.Process]] = []
        for _ in range(count):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
            number = listener.fileno()
            words = ["--role", "edge", *flags, "--listener", str(number), "--address", address]
            edge = stack.enter_context(process(*words, pass_fds=[number]))
            started.append((listener.getsockname()[1], psutil.Process(edge.pid)))
        yield started


class Connection:
    """A connection of a client that reads streams and looks at nothing but their end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def stream(self, max_tokens: int) -> None:
        asked = {"prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        self._writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        reply = await self._reader.readuntil(b"0\r\n\r\n")  # the last chunk
        assert reply.startswith(b"HTTP/1.1 200"), reply[:500]
        assert reply.count(b'"text":') == max_tokens, "an event for each token"

    def close(self) -> None:
        self._writer.close()


def end(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit()


def cpu_s(edge: psutil.Process) -> float:
    times = edge.cpu_times()
    return times.user + times.system


async def measure(port: int, edge: psutil.Process, streams: int) -> dict[str, float]:
    """Return CPU microseconds of a token and of a request."""
    opened = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 24) for _ in range(streams)]
    connections = [Connection(*ends) for ends in opened]

    async def spent_s(max_tokens: int, rounds: int = 1) -> float:
        before_s = cpu_s(edge)
        for _ in range(rounds):
            await asyncio.gather(*(connection.stream(max_tokens) for connection in connections))
        return cpu_s(edge) - before_s

    await spent_s(SHORT_TOKENS)  # caches
    short_s, long_s = await spent_s(SHORT_TOKENS), await spent_s(LONG_TOKENS)
    requests_s = await spent_s(1, REQUESTS_PER_STREAM)
    for connection in connections:
        connection.close()
    token_s = (long_s - short_s) / streams / (LONG_TOKENS - SHORT_TOKENS)
    request_s = requests_s / streams / REQUESTS_PER_STREAM - token_s
    return {"token_us": 1e6 * token_s, "request_us": 1e6 * request_s}


def figures(streams: int, runs: int, profile: Path | None) -> dict[str, Any]:
    """Return the median of the runs for each scope, and all runs."""
    rows: dict[str, list[dict[str, float]]] = {scope: [] for scope in SCOPES}
    with tempfile.TemporaryDirectory(prefix="token-path-") as scratch:
        folder = Path(scratch)
        write_certificates(tls_in(folder))
        for _ in range(runs):
            for scope in SCOPES:  # in turns, so that other load meets all
                with edges_of(scope, folder, profile) as [edge]:
                    rows[scope].append(asyncio.run(measure(*edge, streams)))
                print(scope, rows[scope][-1], file=sys.stderr, flush=True)
    return {
        scope: {
            **{name: round(statistics.median(run[name] for run in found), 1) for name in found[0]},
            "runs": found,
        }
        for scope, found in rows.items()
    }


def scaling(streams: int, runs: int, count: int) -> dict[str, Any]:
    """Return the cost of a token with one edge and with `count`, in turns, and how many single edges those
    are worth: `count` times the ratio of the medians."""
    rows: dict[int, list[float]] = {1: [], count: []}

    async def beside(edges: list[tuple[int, psutil.Process]]) -> list[dict[str, float]]:
        return await asyncio.gather(*(measure(*edge, streams) for edge in edges))

    with tempfile.TemporaryDirectory(prefix="token-path-") as scratch:
        for _ in range(runs):
            for edges, costs_us in rows.items():
                with edges_of("grpc", Path(scratch), count=edges) as started:
                    found = asyncio.run(beside(started))
                costs_us.append(statistics.mean(row["token_us"] for row in found))
                print(edges, "edges:", round(costs_us[-1], 1), "us a token", file=sys.stderr, flush=True)
    alone_us, beside_us = map(statistics.median, rows.values())
    return {
        "token_us": {edges: [round(us, 1) for us in found] for edges, found in rows.items()},
        f"{count} edges over one": round(count * alone_us / beside_us, 2),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--edges", type=int, default=1, help="measure that many beside one instead")
    options.add_argument("--profile", type=Path)
    options.add_argument("--role", choices=["worker", "edge"], help=argparse.SUPPRESS)
    options.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    options.add_argument("--address", help=argparse.SUPPRESS)
    options.add_argument("--tls", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.role is None and chosen.edges > 1:
        print(json.dumps(scaling(chosen.streams, chosen.runs, chosen.edges), indent=2))
        return
    if chosen.role is None:
        found = {"cpu": cpu_name(), "streams": chosen.streams}
        found |= figures(chosen.streams, chosen.runs, chosen.profile)
        print(json.dumps(found, indent=2))
        if chosen.profile is None:
            RESULT.write_text(json.dumps(found, indent=2) + "\n")
        return
    tls = None if chosen.tls is None else tls_in(chosen.tls)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if chosen.role == "worker":
            runner.run(run_worker(tls))
            return
        signal.signal(signal.SIGTERM, end)  # uvicorn raises its signal again at its end
        edge = run_edge(socket.socket(fileno=chosen.listener), chosen.address, tls)
        if chosen.profile is None:
            runner.run(edge)
            return
        profiler = cProfile.Profile()
        try:
            profiler.runcall(runner.run, edge)
        finally:
            profiler.dump_stats(chosen.profile)


if __name__ == "__main__":
    main()
