"""The messages of POST /inference/v1/generate: from a request to its body, from a frame to a delta. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tidemill.workers.messages import (
    BLANKS,
    Delta,
    FinishReason,
    Grammar,
    Request,
    RequestError,
    TokenLogprob,
    WorkerGone,
)
from tidemill.workers.scheduling.sequence import PRIORITY_AGE_S

TOP_P_MIN = 1e-9
"""vLLM takes no 0; this leaves the most likely token as well."""

BIAS_MAX = 1e30
"""JSON has no infinity."""

JSON_OPTIONS = {"whitespace_pattern": BLANKS, "coerce_one_of": True}
"""Options of llguidance in a schema, with the meaning that they have in our own engine."""

FINISHES: dict[str, FinishReason] = {"stop": "stop", "repetition": "stop", "length": "length"}

FIELD = "response_format"

NULL = msgspec.Raw(b"null")

KEEP = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')
"""The kv_transfer_params by which a server keeps the blocks of a prompt, and answers where they are."""


class Likely(msgspec.Struct, frozen=True):
    """A token among the likeliest at a position. `rank` is from 1."""

    token_id: int
    logprob: float
    rank: int | None = None


class Drawn(msgspec.Struct, frozen=True):
    """A drawn token with the likeliest ones, among which it may be."""

    logprob: float
    top_logprobs: list[Likely] = []


class DrawnTokens(msgspec.Struct, frozen=True):
    content: list[Drawn] | None = None


class Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: DrawnTokens | None = None


class ServerError(msgspec.Struct, frozen=True):
    message: str
    code: int = 500
    param: str | None = None

    def raised(self) -> RequestError | WorkerGone:
        """Return what to raise: the request is to blame for codes from 400 to 499."""
        if 400 <= self.code < 500:
            return RequestError(f"vLLM refuses it: {self.message}", param=self.param)
        return WorkerGone(f"vLLM failed: {self.message}")


class Frame(msgspec.Struct, frozen=True):
    """A frame of a stream, a whole answer, or a refusal. `kv_transfer_params`, as JSON, is where another
    server can pull the blocks of the prompt."""

    choices: list[Choice] = []
    error: ServerError | None = None
    kv_transfer_params: msgspec.Raw = NULL


_decoder = msgspec.json.Decoder(Frame)


def frame_of(data: bytes) -> Frame:
    """Decode a frame. Raises WorkerGone: the other side is no vLLM of a version that we know."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WorkerGone(f"vLLM sent what is no frame ({error}): {data[:200]!r}") from None


def delta_of(frame: Frame, logprobs: int | None) -> Delta | None:
    """Return the tokens of a frame, None if it has none. `logprobs` is as in Sampling. Raises RequestError
    and WorkerGone."""
    if frame.error is not None:
        raise frame.error.raised()
    if not frame.choices:
        return None
    choice = frame.choices[0]
    finish = choice.finish_reason
    if finish is not None and finish not in FINISHES:
        raise WorkerGone(f"vLLM ended a stream: {finish}")
    drawn = choice.logprobs.content if choice.logprobs is not None else None
    return Delta(
        tokens=tuple(choice.token_ids or ()),
        logprobs=() if logprobs is None else tuple(_logprobs_of(drawn or [], logprobs)),
        finish=None if finish is None else FINISHES[finish],
    )


def _logprobs_of(drawn: Sequence[Drawn], most: int) -> Iterator[TokenLogprob]:
    for token in drawn:
        likely = sorted((each for each in token.top_logprobs if each.rank), key=lambda each: each.rank or 0)
        top = tuple((each.token_id, each.logprob) for each in likely if (each.rank or 0) <= most)
        yield TokenLogprob(token.logprob, top[:most])


def priority_of(request: Request, arrived_s: float) -> int:
    """Return vLLM's priority, of which lower values go first: our precedence in milliseconds."""
    return int((arrived_s + request.queue_offset_s + PRIORITY_AGE_S * request.priority) * 1e3)


def prompt_body_of(request: Request, priority: int) -> dict[str, Any]:
    """Return the body to compute a prompt for another server. vLLM draws a token, which that server draws
    again, and checks the whole request. Raises RequestError."""
    body = body_of(replace(request, max_new_tokens=1), priority)
    return body | {"stream": False, "kv_transfer_params": KEEP}


def body_of(request: Request, priority: int) -> dict[str, Any]:
    """Return the body for the rest of a request. Raises RequestError."""
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.tokens,
        "sampling_params": _sampling_of(request),
        "stream": True,
        "priority": priority,
    }
    if request.handoff:
        body["kv_transfer_params"] = msgspec.Raw(request.handoff)
    return body | ({"cache_salt": request.salt} if request.salt else {})


def _sampling_of(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    asked: dict[str, Any] = {
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": max(sampling.top_p, TOP_P_MIN),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": min(max(0, sampling.min_tokens - request.drawn), request.max_new_tokens),
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": True,  # stop_token_ids has them, unless the client ignores them
        "detokenize": False,
    }
    if sampling.seeded:
        asked["seed"] = sampling.seed
    if sampling.logprobs is not None:
        asked["logprobs"] = sampling.logprobs + 1
    if sampling.logit_bias:
        asked["logit_bias"] = {
            str(token): min(BIAS_MAX, max(-BIAS_MAX, bias)) for token, bias in sampling.logit_bias
        }
    if sampling.grammar is not None:
        asked["structured_outputs"] = structured_outputs(sampling.grammar)
    return asked


def structured_outputs(grammar: Grammar) -> dict[str, Any]:
    """Return a grammar in vLLM's fields. One in a frame becomes a rule of it. Raises RequestError."""
    if grammar.frame:
        rules = grammar.frame.replace("@answer", "answer")
        return {"grammar": f"{rules}\nanswer: {_rule_of(grammar)}"}
    match grammar.kind:
        case "json_object" | "json_schema":
            return {"json": _schema_of(grammar)}
        case "lark":
            return {"grammar": grammar.text}
        case "regex":
            return {"regex": grammar.text}
        case "choice":
            return {"choice": json.loads(grammar.text)}


def _rule_of(grammar: Grammar) -> str:
    """Return the right side of a rule of Lark. Raises RequestError."""
    match grammar.kind:
        case "json_object" | "json_schema":
            return f"%json {json.dumps(_schema_of(grammar))}"
        case "regex":
            return "/" + grammar.text.replace("/", "\\/") + "/"
        case "choice":
            return " | ".join(map(json.dumps, json.loads(grammar.text)))
        case "lark":
            raise RequestError("vLLM follows no lark grammar behind a thought: use a schema", param=FIELD)


def _schema_of(grammar: Grammar) -> dict[str, Any]:
    """Return the schema with our options. Raises RequestError."""
    try:
        schema: Any = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this {grammar.kind} is not JSON: {error}", param=FIELD) from None
    return {**(schema if isinstance(schema, dict) else {}), "x-guidance": JSON_OPTIONS}
