"""POST /inference/v1/generate: tokens in, tokens out, as vLLM has it, over the requests of completions."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import FailFast, Field, ValidationError

from tidemill.cluster.edge.apis.json_bytes import event, json_bytes, large_json
from tidemill.cluster.edge.apis.openai import DONE
from tidemill.cluster.edge.apis.reply import Reply, Whole, Writer
from tidemill.cluster.edge.chat.request.hints import HintedParams
from tidemill.cluster.edge.chat.request.params import Fields, Params
from tidemill.cluster.edge.chat.request.validation import problems_of, request_error
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.bodies import CompletionBody, StreamOptions
from tidemill.cluster.edge.requests.caller import REQUEST_ID_CHARS_MAX, Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.logprobs import id_logprobs, prompt_logprobs
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import Json, UsageCounter
from tidemill.workers.messages import RequestError

SAMPLING = {*Params.model_fields, "logprobs", "skip_special_tokens", "truncate_prompt_tokens"} - {
    "retain",
    "session_id",
}
HINTS = {*HintedParams.model_fields, "cache_breakpoints"} - SAMPLING
WITHOUT_EFFECT = frozenset(["detokenize", "flat_logprobs", "output_kind", "spaces_between_special_tokens"])
"""Sampling parameters of vLLM about texts and its own processes, which change no token."""

RequestId = Annotated[str, Field(pattern=rf"^[\x21-\x7e]{{1,{REQUEST_ID_CHARS_MAX}}}$")]


class TokensBody(CompletionBody):
    """A completion whose prompt came as `token_ids`."""

    prompt_param = "token_ids"


class GenerateBody(Fields, extra="allow"):
    """The body: a prompt in tokens, vLLM's sampling parameters, and the hints of completions."""

    token_ids: Annotated[list[int], FailFast(), Field(min_length=1)]
    sampling_params: dict[str, Any]
    model: Annotated[str, Field(max_length=256)] | None = None
    request_id: RequestId | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def completion(self) -> TokensBody:
        """Return the completion that is asked for. Raises RequestError."""
        asked = {name: value for name, value in self.sampling_params.items() if name not in WITHOUT_EFFECT}
        unknown = next((name for name, value in asked.items() if name not in SAMPLING and value), None)
        if unknown is not None:
            param = f"sampling_params.{unknown[:64]}"
            raise RequestError(
                f"{param} is not supported: leave it out", param=param, code="unsupported_parameter"
            )
        sampling = {name: value for name, value in asked.items() if name in SAMPLING}
        misplaced = self.misplaced()
        hints = {name: value for name, value in (self.model_extra or {}).items() if name not in misplaced}
        fields = {**hints, **sampling, "prompt": self.token_ids, "stream": self.stream}
        try:
            return TokensBody.model_validate(fields)
        except ValidationError as error:
            inside = error.errors()[0]["loc"][:1] in [(name,) for name in sampling]
            raise request_error(problems_of(error, *(["sampling_params"] if inside else []))) from None

    def misplaced(self) -> tuple[str, ...]:
        """Return the fields of completions that have no effect here."""
        known = CompletionBody.model_fields.keys() - HINTS
        return tuple(name for name in self.model_extra or {} if name in known)


async def generate(edge: EdgeContext, model: EdgeModel, body: GenerateBody, caller: Caller) -> Reply:
    """Continue a prompt in tokens with tokens, streamed or whole, as vLLM does."""
    job = await model.intake.completion(body.completion(), caller)
    job = replace(job, ignored=(*job.ignored, *body.misplaced()))
    name, tally = body.request_id or edge.sources.new_id(), UsageCounter(job)

    async def whole(choices: Sequence[Sequence[Increment]]) -> bytes:
        found = await asyncio.to_thread(_whole, name, model, job, choices)
        found["usage"] = tally.usage()
        return await large_json(found) if job.logprobs else json_bytes(found)

    streamed = _Tokens(name, job, body.stream_options, tally)
    writer = streamed if body.stream else Whole(tally, len(job.requests), whole)
    return Reply(model=model, job=job, kind="tokens", id=name, writer=writer, streams=body.stream)


class _Tokens(Writer):
    """Writes the tokens of each choice in chunks."""

    def __init__(self, name: str, job: PreparedRequest, options: StreamOptions, tally: UsageCounter) -> None:
        super().__init__(tally)
        self._name = name
        self._job = job
        self._options = options

    def grow(self, increment: Increment) -> Iterable[bytes]:
        if increment.tokens or increment.growth.finish is not None:
            yield event(self._chunk([_choice(self._job, increment.choice, [increment])]))

    def error(self, body: Mapping[str, object]) -> Iterable[bytes]:
        return (event(body, "error"),)

    async def close(self) -> Iterable[bytes]:
        usage = event({**self._chunk([]), "usage": self.tally.usage()})
        return (usage, DONE) if self._options.include_usage else (DONE,)

    def _chunk(self, choices: Sequence[Json]) -> Json:
        chunk: Json = {"request_id": self._name, "choices": choices}
        return {**chunk, "usage": self.tally.usage()} if self._options.continuous_usage_stats else chunk


def _choice(job: PreparedRequest, index: int, increments: Sequence[Increment]) -> Json:
    tokens = [token for increment in increments for token in increment.tokens]
    logprobs = [logprob for increment in increments for logprob in increment.logprobs]
    return {
        "index": index,
        "logprobs": id_logprobs(tokens, logprobs) if job.logprobs else None,
        "finish_reason": increments[-1].growth.finish,
        "token_ids": tokens,
    }


def _whole(name: str, model: EdgeModel, job: PreparedRequest, choices: Sequence[Sequence[Increment]]) -> Json:
    """Return a whole reply without its usage."""
    scores = [score for increment in choices[0] for score in increment.prompt_logprobs]
    shown = job.prompt_logprobs
    tokens, piece = job.requests[0].tokens, model.tokenizer.piece
    return {
        "request_id": name,
        "model": model.name,
        "choices": [_choice(job, index, increments) for index, increments in enumerate(choices)],
        "prompt_logprobs": None if shown is None else prompt_logprobs(tokens, scores, shown, piece),
        "kv_transfer_params": None,
    }
