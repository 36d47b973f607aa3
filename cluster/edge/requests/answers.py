"""The growing answers of one request: a stream of the service per choice, all merged."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tidemill.cluster.edge.chat.output.detokenizer import Answer, Growth
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.output_parser import Parser
from tidemill.cluster.edge.chat.output.parts import Part
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.requests.echo import Echo
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.service import Service
from tidemill.workers.inbox import Emit, Enough, Pause
from tidemill.workers.messages import Request, StreamPiece, TokenLogprob, Trace, Unserved


class Increment(msgspec.Struct, frozen=True, kw_only=True):
    """The addition of one piece to a choice."""

    choice: int
    growth: Growth
    trace: Trace
    tokens: Sequence[int] = ()  # all that the growth counts
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens, if asked for
    prompt_logprobs: Sequence[TokenLogprob] = ()  # in the first increment: all of them
    parts: Sequence[Part] = ()  # of a chat: the parts that this text completes
    calls: int = 0  # of tools, so far
    pooled: bytes = b""  # see Delta


async def answer(
    service: Service, tokenizer: FolderTokenizer, job: PreparedRequest, emit: Emit[Increment]
) -> None:
    """Emit all choices of `job` until each has finished. Cancelling this, or a failure, cancels the running
    ones. Raises Unserved and RequestError."""
    choices: list[Coroutine[Any, Any, None]] = []
    tags = () if job.output_format is None else job.output_format.tags
    shown = tuple(tokenizer.added) if job.special_tokens else tags
    for index, request in enumerate(job.requests):
        choice = _Choice(
            index,
            Answer(request, tokenizer.decoder(shown), job.ending),
            None if job.output_format is None else open_parser(job.output_format),
            None if job.echoes is None else Echo(job.echoes[index // job.n], tokenizer.piece),
            emit,
        )
        choices.append(choice.run(service, request))
    if len(choices) == 1:  # the usual case needs no task of its own
        await choices[0]
        return
    free = asyncio.Semaphore(job.concurrent_max)
    tasks = [asyncio.create_task(_when_free(free, choice)) for choice in choices]
    try:
        await asyncio.gather(*tasks)
    finally:
        running = [task for task in tasks if task.cancel()]
        await asyncio.gather(*running, return_exceptions=True)


async def _when_free(free: asyncio.Semaphore, choice: Coroutine[Any, Any, None]) -> None:
    try:
        async with free:
            await choice
    finally:
        choice.close()  # it may not have begun


class _Choice:
    """One growing choice."""

    def __init__(
        self, index: int, answer: Answer, speech: Parser | None, echo: Echo | None, emit: Emit[Increment]
    ) -> None:
        self._index = index
        self._answer = answer
        self._speech = speech
        self._echo = echo
        self._emit = emit
        self._scores: list[TokenLogprob] = []  # of the prompt, not passed on yet
        self._finished = False

    async def run(self, service: Service, request: Request) -> None:
        with suppress(Enough):
            await service.stream(request, self._take_pooled if request.pools else self._take)
        if not self._finished:
            raise Unserved("the stream of tokens ended before the answer was complete")

    def _take_pooled(self, piece: StreamPiece) -> Pause | None:
        if not piece.pooled:
            raise Unserved("a worker of an earlier release has answered: upgrade it")
        self._finished = True
        growth = Growth(text="", num_tokens=0, finish=piece.finish)
        return self._emit(
            Increment(choice=self._index, growth=growth, trace=piece.trace, pooled=piece.pooled)
        )

    def _take(self, piece: StreamPiece) -> Pause | None:
        self._scores += piece.prompt_logprobs
        if piece.prompt_logprobs and not piece.tokens:
            return None
        scores, self._scores = self._scores, []
        growth = self._answer.push(piece.tokens, piece.logprobs, piece.finish)
        if self._echo is not None:
            growth = self._echo.add(growth, scores)
        speech = self._speech
        increment = Increment(
            choice=self._index,
            growth=growth,
            trace=piece.trace,
            tokens=piece.tokens[: growth.num_tokens],
            logprobs=piece.logprobs[: growth.num_tokens],
            prompt_logprobs=scores,
            parts=() if speech is None else speech.push(growth.text, last=growth.finish is not None),
            calls=0 if speech is None else speech.num_calls,
        )
        pause = self._emit(increment)
        self._finished = growth.finish is not None
        if self._finished and piece.finish is None:
            raise Enough
        return pause
