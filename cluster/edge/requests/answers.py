"""The growing answers of one request: a stream of the service per choice, all merged."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from tidemill.cluster.edge.chat.output.detokenizer import Answer, Growth
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.parts import Parser, Part
from tidemill.cluster.edge.chat.text import Tokenizer
from tidemill.cluster.edge.requests.echo import Echo
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.service import Service
from tidemill.workers.messages import FinishReason, Request, TokenLogprob, Trace, Unserved


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


IncrementSink = Callable[[Increment], bool]
"""Takes an increment in place of its reader, or returns False and leaves everything as it was."""


async def answers(
    service: Service, tokenizer: Tokenizer, job: PreparedRequest, sink: IncrementSink | None = None
) -> AsyncGenerator[Increment]:
    """Yield all choices of `job` until each has finished, without what `sink` takes. Closing it cancels the
    running ones. Raises Unserved and RequestError.

    Every stream of the service is opened and closed here. The reader pulls, so at most one increment of
    each choice waits.
    """
    async with AsyncExitStack() as stack:
        streams: list[AsyncGenerator[Increment]] = []
        for index, request in enumerate(job.requests):
            shown = () if job.output_format is None else job.output_format.tags
            choice = _Choice(
                index,
                Answer(request, tokenizer.decoder(shown), job.ending),
                None if job.output_format is None else open_parser(job.output_format),
                None if job.echoes is None else Echo(job.echoes[index // job.n], tokenizer.piece),
            )
            streams.append(choice.read(service, request, sink))
            stack.push_async_callback(streams[-1].aclose)
        if len(streams) == 1:  # the usual case needs no task per increment
            async for increment in streams[0]:
                yield increment
            return
        async with aclosing(_merged(streams)) as merged:
            async for increment in merged:
                yield increment


class _Choice:
    """One growing choice."""

    def __init__(self, index: int, answer: Answer, speech: Parser | None, echo: Echo | None) -> None:
        self._index = index
        self._answer = answer
        self._speech = speech
        self._echo = echo
        self._scores: list[TokenLogprob] = []  # of the prompt, not passed on yet

    async def read(
        self, service: Service, request: Request, sink: IncrementSink | None
    ) -> AsyncGenerator[Increment]:
        trace: Trace | None = None
        untaken: Increment | None = None  # of the token that the stream brings next

        def take(token: int) -> bool:
            """Pass on a token now: a TokenSink. One that ends the answer stays to the stream."""
            nonlocal untaken
            if sink is None or trace is None:
                return False
            increment = self._add((token,), (), None, trace)
            if increment.growth.finish is None and sink(increment):
                return True
            untaken = increment
            return False

        pieces = service.generate(request) if sink is None else service.generate(request, take)
        async with aclosing(pieces):
            async for piece in pieces:
                trace = piece.trace
                self._scores += piece.prompt_logprobs
                if piece.prompt_logprobs and not piece.tokens:
                    continue
                increment, untaken = untaken, None
                if increment is None:
                    increment = self._add(piece.tokens, piece.logprobs, piece.finish, trace)
                assert increment.growth.num_tokens <= len(piece.tokens), "an increment is of its own piece"
                yield increment
                if increment.growth.finish:
                    return
        raise Unserved("the stream of tokens ended before the answer was complete")

    def _add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish: FinishReason | None,
        trace: Trace,
    ) -> Increment:
        scores, self._scores = self._scores, []
        growth = self._answer.push(tokens, logprobs, finish)
        if self._echo is not None:
            growth = self._echo.add(growth, scores)
        speech = self._speech
        return Increment(
            choice=self._index,
            growth=growth,
            trace=trace,
            tokens=tokens[: growth.num_tokens],
            prompt_logprobs=scores,
            parts=() if speech is None else speech.push(growth.text, last=growth.finish is not None),
            calls=0 if speech is None else speech.num_calls,
        )


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
