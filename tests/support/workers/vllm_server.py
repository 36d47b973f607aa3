"""A small HTTP server that speaks as vLLM 0.32 does: what it answers is recorded from one."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

METRICS = """\
vllm:cache_config_info{block_size="4",engine="0",kv_cache_memory_bytes="4096",mamba_cache_mode="none",\
num_gpu_blocks="64"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} %(running)d
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} %(usage)f
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 4.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} %(steps)d
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 1000.0
"""

FAKE = """\
#!{python}
import asyncio, os, subprocess, sys
sys.path[:0] = {path!r}
from tests.support.workers.vllm_server import VllmServer
{behaviour}
async def main(port):
    async with await asyncio.start_server(VllmServer().serve, "127.0.0.1", port):
        await asyncio.Event().wait()

if "-c" in sys.argv:
    print("{version} {nixl}")
else:
    asyncio.run(main(int(sys.argv[sys.argv.index("--port") + 1])))
"""

TOKEN_S = 0.02
"""The time of a token that no test has scripted."""

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

HANDOFF = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 9}

REFUSAL = {"error": {"message": "temperature must be in [0, 2]", "param": "temperature", "code": 400}}


def frame_of(*tokens: int, finish: str | None = None, logprobs: list[dict[str, Any]] | None = None) -> bytes:
    """Return a frame of a stream; `logprobs` has an entry for each token."""
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": None if logprobs is None else {"content": logprobs},
    }
    frame = {
        "request_id": "generate-tokens-1",
        "usage": None,
        "output_mode": "tokens",
        "choices": [choice],
    }
    return json.dumps(frame).encode()


def fake_python(folder: Path, behaviour: str = "", version: str = "0.32.0+cpu", *, nixl: bool = True) -> Path:
    """Return a python whose vLLM is this server, and runs `behaviour` before."""
    path = [entry for entry in sys.path if entry]
    python = folder / "python"
    facts = {"python": sys.executable, "path": path, "version": version, "nixl": nixl}
    python.write_text(FAKE.format(behaviour=behaviour, **facts))
    python.chmod(0o700)
    return python


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class VllmServer:
    """Answers each request with the next of `answers`: frames, or None for a stream that goes on without
    tokens. An answer that lacks a finish ends with the connection. Without answers the tokens follow from
    their positions."""

    def __init__(self, *answers: list[bytes | None], prioritizes: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.steps = 0
        self.usage = 0.25  # of its memory
        self.health = 200
        self.sources: dict[str, Any] = {}  # of KV events
        self.closed = asyncio.Event()  # a client left before its answer ended
        self.url = ""
        self.tasks: set[asyncio.Task[object]] = set()
        self.at_end = AsyncExitStack()
        self._answers = list(answers)
        self._prioritizes = prioritizes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while True:
                    await self._answer(reader, writer)
        finally:
            writer.close()
            self.tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length) or b"null")
        match head.split()[1]:
            case "/metrics":
                facts = {"running": len(self.bodies), "steps": self.steps, "usage": self.usage}
                self._reply(writer, 200, (METRICS % facts).encode())
            case "/health":
                self._reply(writer, self.health, b"")
            case "/v1/models":
                self._reply(writer, 200, b'{"data": [{"id": "m", "max_model_len": 512}]}')
            case "/kv_event_sources":
                self._reply(writer, 200, json.dumps(self.sources).encode())
            case _ if body.get("kv_transfer_params", {}).get("do_remote_decode"):
                self.bodies.append(body)
                await self._prefill(reader, writer)
            case _ if not body.get("stream"):
                refused = body.get("priority") and not self._prioritizes
                self._reply(writer, 400 if refused else 200, json.dumps(REFUSAL if refused else {}).encode())
            case _:
                self.bodies.append(body)
                await self._stream(reader, writer)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = self._answers.pop(0) if self._answers else None
        if frames is None:
            await self._count(writer)
            return
        refusal = json.dumps(REFUSAL).encode()
        if refusal in frames:
            self._reply(writer, 400, refusal)
            return
        writer.write(HEAD)
        for frame in frames:
            if frame is None:
                await reader.read()
                self.closed.set()
                raise ConnectionResetError
            self.steps += 1
            self._chunk(writer, event(frame))
            await asyncio.sleep(0)
        if b'"finish_reason": null' in (frames[-1] or b""):
            raise ConnectionResetError
        self._chunk(writer, event(b"[DONE]"))
        self._chunk(writer, b"")

    async def _prefill(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer with the next of `answers`, whole, or with what a server gives that keeps a prompt."""
        usual: list[bytes | None] = [json.dumps({"kv_transfer_params": HANDOFF}).encode()]
        answer = (self._answers.pop(0) if self._answers else usual)[0]
        if answer is None:
            await reader.read()
            self.closed.set()
            raise ConnectionResetError
        self.steps += 1
        self._reply(writer, 400 if b'"error"' in answer else 200, answer)

    async def _count(self, writer: asyncio.StreamWriter) -> None:
        body = self.bodies[-1]
        start, num_tokens = len(body["token_ids"]), body["sampling_params"]["max_tokens"]
        writer.write(HEAD)
        for position in range(start, start + num_tokens):
            await asyncio.sleep(TOKEN_S)
            is_last = position + 1 == start + num_tokens
            self.steps += 1
            self._chunk(writer, event(frame_of(100 + position % 500, finish="length" if is_last else None)))
            await writer.drain()
        self._chunk(writer, event(b"[DONE]"))
        self._chunk(writer, b"")

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


@asynccontextmanager
async def serving(server: VllmServer) -> AsyncGenerator[VllmServer]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        await server.at_end.aclose()
        listener.close()
        for task in (tasks := list(server.tasks)):
            task.cancel()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)  # the sockets close
