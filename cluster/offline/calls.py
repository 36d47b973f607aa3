"""The requests of one offline call: all are answered, or none continues."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tidemill.cluster.edge.chat.output.detokenizer import Answer, Ending
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.offline.outputs import CompletionOutput, Logprob, RequestOutput, logprobs_of
from tidemill.workers.engine.engine import Engine
from tidemill.workers.inbox import Enough
from tidemill.workers.messages import Delta, FinishReason, Request, TokenLogprob, WorkerGone

IN_LINE_MAX = 1024
"""The requests that the engine has concurrently; others wait before it."""


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt: its requests, one per choice, and its text if it came as text."""

    requests: list[Request]
    ending: Ending
    text: str | None


@dataclass(frozen=True, slots=True)
class Answered:
    """One choice, the number of its prompt's tokens that needed no computation, and its total logprob."""

    output: CompletionOutput
    cached_tokens: int
    prompt_logprobs: list[TokenLogprob]


async def answer_all(
    engine: Engine, tokenizer: FolderTokenizer, jobs: Sequence[PromptJob], answered: Callable[[], None]
) -> list[RequestOutput]:
    """Return the answers in the order of the jobs; call `answered` after each choice. Raises RequestError,
    WorkerGone."""
    line = asyncio.Semaphore(IN_LINE_MAX)

    async def answer(request: Request, ending: Ending, index: int) -> Answered:
        async with line:
            output = await _answer(engine, tokenizer, request, ending, index)
        answered()
        return output

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                [
                    group.create_task(answer(request, job.ending, index))
                    for index, request in enumerate(job.requests)
                ]
                for job in jobs
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [
        _output(job, [task.result() for task in choices], tokenizer.piece)
        for job, choices in zip(jobs, tasks, strict=True)
    ]


def _output(job: PromptJob, found: list[Answered], piece: Callable[[int], bytes]) -> RequestOutput:
    first = found[0]
    scores: list[dict[int, Logprob] | None] | None = None
    request = job.requests[0]
    if request.sampling.prompt_logprobs is not None:
        scores = [None, *logprobs_of(request.tokens[1:], first.prompt_logprobs, piece)]
    return RequestOutput(
        request_id=job.requests[0].request_id,
        prompt=job.text,
        prompt_token_ids=list(job.requests[0].tokens),
        outputs=[result.output for result in found],
        num_cached_tokens=first.cached_tokens,
        prompt_logprobs=scores,
    )


async def _answer(
    engine: Engine, tokenizer: FolderTokenizer, request: Request, ending: Ending, index: int
) -> Answered:
    answer = Answer(request, tokenizer.decoder(), ending)
    texts: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    cached_tokens = 0
    finish: FinishReason | None = None
    stop: str | int | None = None

    def take(delta: Delta) -> None:
        nonlocal cached_tokens, finish, stop
        if delta.provenance is not None:
            cached_tokens = delta.provenance.reused_tokens + delta.provenance.fetched_tokens
        prompt_logprobs.extend(delta.prompt_logprobs)
        growth = answer.push(delta.tokens, delta.logprobs, delta.finish)
        texts.append(growth.text)
        tokens.extend(delta.tokens[: growth.num_tokens])
        logprobs.extend(delta.logprobs[: growth.num_tokens])
        finish, stop = growth.finish, growth.stop
        if finish is not None:
            raise Enough

    with suppress(Enough):
        await engine.stream(request, take)
    if finish is None:
        raise WorkerGone("the engine ended an answer that was not finished")
    scored = request.sampling.logprobs is not None
    output = CompletionOutput(
        index=index,
        text="".join(texts),
        token_ids=tokens,
        cumulative_logprob=sum(logprob.logprob for logprob in logprobs) if scored else None,
        logprobs=logprobs_of(tokens, logprobs, tokenizer.piece) if scored else None,
        finish_reason=finish,
        stop_reason=stop,
    )
    return Answered(output, cached_tokens, prompt_logprobs)
