"""Call one vLLM server over HTTP."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from functools import cached_property
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from tidemill.workers.messages import WorkerGone
from tidemill.workers.vllm.generate import NULL, Frame, ServerError, frame_of
from tidemill.workers.vllm.metrics import Metrics

CALL_S_MAX = 10.0
"""The time limit of calls that do not generate."""

GENERATE = "/inference/v1/generate"
JSON = {"Content-Type": "application/json"}
UNTIL_ANSWERED = aiohttp.ClientTimeout(sock_connect=CALL_S_MAX)
KEPT_S = 3.0
"""The time for which an idle connection is kept: vLLM closes it after 5 s."""

END = b"data: [DONE]"
FAILURES = aiohttp.ClientError, TimeoutError


class VllmClient:
    """The server at `url`. Without the `api_key` of a server that asks for one it refuses everything."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @cached_property
    def _http(self) -> aiohttp.ClientSession:
        """The connections. aiohttp takes a third of the CPU time of httpx for the frames of a stream."""
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(CALL_S_MAX),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._http.close()

    async def metrics(self) -> Metrics:
        """Raises WorkerGone."""
        try:
            async with self._http.get(f"{self.url}/metrics", raise_for_status=True) as answer:
                return Metrics.parse(await answer.read())
        except FAILURES as error:
            raise self._gone(error) from error

    async def is_dead(self) -> bool:
        """Return whether the server answers that its engine has ended, which it does before it ends. A
        client that is closed asks nothing."""
        if self._http.closed:
            return False
        try:
            async with self._http.get(f"{self.url}/health") as answer:
                return answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        except FAILURES:
            return False

    async def prefill(self, body: dict[str, Any]) -> bytes | None:
        """Compute a prompt, and return where its blocks can be pulled, as JSON; None: nowhere. Raises
        WorkerGone and RequestError."""
        try:
            async with self._asked(body) as answer:
                content = await answer.read()
        except FAILURES as error:
            raise self._gone(error) from error
        if not answer.ok:
            raise _refusal(answer.status, content)
        found = frame_of(content).kv_transfer_params
        return None if found == NULL else bytes(found)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[Frame]:
        """Yield the frames of a stream. Closing it ends the request there. Raises WorkerGone and
        RequestError."""
        is_whole = False
        try:
            async with self._asked(body) as answer:
                if not answer.ok:
                    raise _refusal(answer.status, await answer.read())
                async with aclosing(_lines(answer.content)) as lines:
                    async for line in lines:  # to the end of the answer, so that the connection is kept
                        if line == END:
                            is_whole = True
                        else:
                            yield frame_of(line.removeprefix(b"data: "))
        except FAILURES as error:
            if not is_whole:
                raise self._gone(error) from error
        if not is_whole:
            raise WorkerGone(f"vLLM at {self.url} closed a stream that was not finished")

    def _asked(self, body: dict[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        data = msgspec.json.encode(body)
        return self._http.post(f"{self.url}{GENERATE}", data=data, headers=JSON, timeout=UNTIL_ANSWERED)

    def _gone(self, error: Exception) -> WorkerGone:
        return WorkerGone(f"vLLM at {self.url} does not answer: {type(error).__name__}: {error}")


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the lines of events, without the empty ones between them."""
    rest = b""
    async for data in content.iter_any():
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
