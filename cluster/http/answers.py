"""The answers of one job as they grow: the pieces of each choice decoded, cut at stop strings, and merged."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from tidemill.cluster.http.intake import Job
from tidemill.cluster.http.text import Decoder, StopScanner, Tokenizer
from tidemill.cluster.service import Service
from tidemill.workers.messages import FinishReason, Piece, Request, Trace, Unserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """What a piece adds to a choice. `num_tokens` counts the tokens of a stop string, and a stop token."""

    choice: int
    text: str
    num_tokens: int
    trace: Trace
    finish: FinishReason | None


class Choice:
    """The text of one choice so far; no I/O."""

    def __init__(self, index: int, request: Request, decoder: Decoder, stops: Sequence[str]) -> None:
        self._index = index
        self._stop_token_ids = request.stop_token_ids
        self._decoder = decoder
        self._scanner = StopScanner(stops)

    def push(self, piece: Piece) -> Increment:
        tokens = piece.tokens
        num_tokens = len(tokens)
        finish = piece.finish
        if finish == "stop" and tokens and tokens[-1] in self._stop_token_ids:
            tokens = tokens[:-1]
        texts: list[str] = []
        for count, token in enumerate(tokens, start=1):
            texts.append(self._scanner.push(self._decoder.push(token)))
            if self._scanner.stopped:
                num_tokens, finish = count, "stop"
                break
        if finish:
            texts.append(self._scanner.end())
        return Increment(
            choice=self._index, text="".join(texts), num_tokens=num_tokens, trace=piece.trace, finish=finish
        )


async def answers(service: Service, tokenizer: Tokenizer, job: Job) -> AsyncGenerator[Increment]:
    """All choices of `job` until each has finished. Closing it cancels what still runs. Raises Unserved.

    Every stream of the service is opened and closed here. The reader pulls: at most one increment of
    each choice waits.
    """
    async with AsyncExitStack() as stack:
        streams: list[AsyncGenerator[Increment]] = []
        for index, request in enumerate(job.requests):
            choice = Choice(index, request, tokenizer.decoder(), job.stops)
            streams.append(_read(service.generate(request), choice))
            stack.push_async_callback(streams[-1].aclose)
        if len(streams) == 1:  # the usual case needs no task for each increment
            async for increment in streams[0]:
                yield increment
            return
        async with aclosing(_merged(streams)) as merged:
            async for increment in merged:
                yield increment


async def _read(pieces: AsyncGenerator[Piece], choice: Choice) -> AsyncGenerator[Increment]:
    async with aclosing(pieces):
        async for piece in pieces:
            increment = choice.push(piece)
            yield increment
            if increment.finish:
                return
    raise Unserved("the stream of tokens ended before the answer was complete")


async def _merged(streams: Sequence[AsyncGenerator[Increment]]) -> AsyncGenerator[Increment]:
    """Items of all streams, in the order in which they come."""
    waiting = {asyncio.create_task(_next(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                item = task.result()
                if item is not None:
                    yield item
                    waiting[asyncio.create_task(_next(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: AsyncGenerator[Increment]) -> Increment | None:
    return await anext(stream, None)
