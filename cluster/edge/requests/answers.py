"""The growing answers of one request: a stream of the service per choice, all merged."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from tidemill.cluster.edge.chat.output.detokenizer import Answer, Growth
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.parts import Parser, Part
from tidemill.cluster.edge.chat.text import Tokenizer
from tidemill.cluster.edge.requests.echo import Echo
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.service import Service
from tidemill.workers.messages import StreamPiece, TokenLogprob, Trace, Unserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """The addition of one piece to a choice."""

    choice: int
    growth: Growth
    trace: Trace
    tokens: Sequence[int] = ()  # all that the growth counts
    prompt_logprobs: Sequence[TokenLogprob] = ()  # in the first increment: all of them
    parts: Sequence[Part] = ()  # of a chat: the parts that this text completes
    calls: int = 0  # of tools, so far


async def answers(service: Service, tokenizer: Tokenizer, job: PreparedRequest) -> AsyncGenerator[Increment]:
    """Yield all choices of `job` until each has finished. Closing it cancels the running ones. Raises
    Unserved and RequestError.

    Every stream of the service is opened and closed here. The reader pulls, so at most one increment of
    each choice waits.
    """
    async with AsyncExitStack() as stack:
        streams: list[AsyncGenerator[Increment]] = []
        for index, request in enumerate(job.requests):
            shown = () if job.output_format is None else job.output_format.tags
            answer = Answer(request, tokenizer.decoder(shown), job.ending)
            speech = None if job.output_format is None else open_parser(job.output_format)
            echo = None if job.echoes is None else Echo(job.echoes[index // job.n], tokenizer.piece)
            streams.append(_read(service.generate(request), answer, speech, echo, index))
            stack.push_async_callback(streams[-1].aclose)
        if len(streams) == 1:  # the usual case needs no task per increment
            async for increment in streams[0]:
                yield increment
            return
        async with aclosing(_merged(streams)) as merged:
            async for increment in merged:
                yield increment


async def _read(
    pieces: AsyncGenerator[StreamPiece], answer: Answer, speech: Parser | None, echo: Echo | None, choice: int
) -> AsyncGenerator[Increment]:
    scores: list[TokenLogprob] = []
    async with aclosing(pieces):
        async for piece in pieces:
            scores += piece.prompt_logprobs
            if piece.prompt_logprobs and not piece.tokens:
                continue
            growth = answer.push(piece.tokens, piece.logprobs, piece.finish)
            if echo is not None:
                growth = echo.add(growth, scores)
            parts = () if speech is None else speech.push(growth.text, last=growth.finish is not None)
            yield Increment(
                choice=choice,
                growth=growth,
                trace=piece.trace,
                tokens=piece.tokens[: growth.num_tokens],
                prompt_logprobs=scores,
                parts=parts,
                calls=0 if speech is None else speech.num_calls,
            )
            scores = []
            if growth.finish:
                return
    raise Unserved("the stream of tokens ended before the answer was complete")


async def _merged(streams: Sequence[AsyncGenerator[Increment]]) -> AsyncGenerator[Increment]:
    """Yield items of all streams in the order of their arrival."""
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
