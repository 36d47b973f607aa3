"""Call one vLLM server over HTTP."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import msgspec

from tidemill.workers.messages import WorkerGone
from tidemill.workers.vllm.generate import NULL, Frame, ServerError, frame_of
from tidemill.workers.vllm.metrics import Metrics

CALL_S_MAX = 10.0
"""The time limit of calls that do not generate."""

GENERATE = "/inference/v1/generate"
JSON = {"Content-Type": "application/json"}
UNTIL_ANSWERED = httpx.Timeout(CALL_S_MAX, read=None)

END = b"data: [DONE]"

UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class VllmClient:
    """The server at `url`. Without the `api_key` of a server that asks for one it refuses everything."""

    def __init__(self, url: str, api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, limits=UNLIMITED, timeout=CALL_S_MAX, trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def metrics(self) -> Metrics:
        """Raises httpx.HTTPError."""
        answer = await self._http.get("/metrics")
        answer.raise_for_status()
        return Metrics.parse(answer.content)

    async def is_dead(self) -> bool:
        """Return whether the server answers that its engine has ended, which it does before it ends."""
        try:
            return (await self._http.get("/health")).is_server_error
        except httpx.HTTPError:
            return False

    async def prefill(self, body: dict[str, Any]) -> bytes | None:
        """Compute a prompt, and return where its blocks can be pulled, as JSON; None: nowhere. Raises
        WorkerGone and RequestError."""
        try:
            answer = await self._http.post(
                GENERATE, content=msgspec.json.encode(body), headers=JSON, timeout=UNTIL_ANSWERED
            )
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        if not answer.is_success:
            raise _refusal(answer.status_code, answer.content)
        found = frame_of(answer.content).kv_transfer_params
        return None if found == NULL else bytes(found)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[Frame]:
        """Yield the frames of a stream. Closing it ends the request there. Raises WorkerGone and
        RequestError."""
        asked = self._http.stream(
            "POST", GENERATE, content=msgspec.json.encode(body), headers=JSON, timeout=UNTIL_ANSWERED
        )
        try:
            async with asked as answer:
                if not answer.is_success:
                    raise _refusal(answer.status_code, await answer.aread())
                async with aclosing(_lines(answer)) as lines:
                    async for line in lines:
                        if line == END:
                            return
                        yield frame_of(line.removeprefix(b"data: "))
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        raise WorkerGone(f"vLLM at {self.url} closed a stream that was not finished")

    def _gone(self, error: httpx.HTTPError) -> WorkerGone:
        return WorkerGone(f"vLLM at {self.url} does not answer: {type(error).__name__}: {error}")


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield the lines of events, without the empty ones between them."""
    rest = b""
    async for data in answer.aiter_raw():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line:
                yield line


def _refusal(status: int, content: bytes) -> Exception:
    """Return what an answer without a stream means."""
    try:
        error = frame_of(content).error
    except WorkerGone:
        error = None
    return (error or ServerError(content[:200].decode(errors="replace"), status)).raised()
