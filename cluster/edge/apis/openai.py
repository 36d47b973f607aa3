"""OpenAI's chats and completions: chunks of a stream, whole answers, usage."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Literal

from tidemill.cluster.edge.apis.json_bytes import event, json_bytes, large_json
from tidemill.cluster.edge.apis.reply import Reply, Whole, Writer
from tidemill.cluster.edge.chat.output.detokenizer import Growth, Scored
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text, joined
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.bodies import ChatBody, CompletionBody, StreamOptions
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.logprobs import Piece, chat_logprobs, completion_logprobs, prompt_logprobs
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import Json, UsageCounter

Kind = Literal["chat", "text"]

DONE = b"data: [DONE]\n\n"

MARK = "\0"
"""A text whose JSON occurs in no event behind the text."""


async def chat(edge: EdgeContext, model: EdgeModel, body: ChatBody, caller: Caller) -> Reply:
    """Answer a chat as the assistant, streamed or whole."""
    job = await model.intake.chat(body, caller)
    return _reply(edge, model, job, "chat", body.stream_options if body.stream else None)


async def completions(edge: EdgeContext, model: EdgeModel, body: CompletionBody, caller: Caller) -> Reply:
    """Continue one prompt or several, streamed or whole."""
    job = await model.intake.completion(body, caller)
    return _reply(edge, model, job, "text", body.stream_options if body.stream else None)


def _reply(
    edge: EdgeContext, model: EdgeModel, job: PreparedRequest, kind: Kind, stream: StreamOptions | None
) -> Reply:
    head = ReplyHead(
        kind=kind,
        reply_id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{edge.sources.new_id()}",
        created_s=int(edge.sources.unix_time_s()),
        model=model.name,
        piece=model.tokenizer.piece,
        prompts=[sent.tokens for sent in job.requests] if job.token_ids else None,
    )
    tally = UsageCounter(job)

    async def whole(choices: Sequence[Sequence[Increment]]) -> bytes:
        if not (job.logprobs or job.prompt_logprobs or job.token_ids):
            return json_bytes(whole_reply(head, job, choices, tally.usage()))
        return await large_json(await asyncio.to_thread(whole_reply, head, job, choices, tally.usage()))

    writer = Whole(tally, len(job.requests), whole) if stream is None else Chunks(head, stream, tally, job)
    return Reply(model=model, job=job, kind=kind, id=head.reply_id, writer=writer, streams=stream is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """The fields that every chunk of one reply repeats."""

    kind: Kind
    reply_id: str
    created_s: int  # unix time
    model: str
    piece: Piece  # returns the bytes of a token
    prompts: Sequence[Sequence[int]] | None = None  # of each choice, if the reply has token ids

    def logprobs(self, scored: Sequence[Scored]) -> Json:
        write = chat_logprobs if self.kind == "chat" else completion_logprobs
        return write(scored, self.piece)

    def call_id(self, choice: int) -> str:
        """Return the prefix of the ids of a choice's tool calls."""
        return f"call-{self.reply_id.partition('-')[2]}-{choice}"

    def chunk(self, choices: Sequence[Json]) -> Json:
        return self._body("chat.completion.chunk" if self.kind == "chat" else "text_completion", choices)

    def whole(self, choices: Sequence[Json]) -> Json:
        return self._body("chat.completion" if self.kind == "chat" else "text_completion", choices)

    def _body(self, shape: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.reply_id,
            "object": shape,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


def opening_chunk(head: ReplyHead, index: int) -> Json:
    """Return what precedes the text of a chat's choice."""
    delta = {"role": "assistant", "content": ""}
    chunk = head.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
    return chunk if head.prompts is None else {**chunk, "prompt_token_ids": head.prompts[index]}


def chunk_choice(head: ReplyHead, increment: Increment) -> Json:
    growth = increment.growth
    text: Json = {"text": growth.text}
    if head.kind == "chat":
        text = {"delta": _delta(increment.parts, head.call_id(increment.choice))}
    logprobs = head.logprobs(growth.scored) if growth.scored else None
    choice = {"index": increment.choice, **text, "logprobs": logprobs, "finish_reason": _finish(increment)}
    return choice if head.prompts is None else {**choice, "token_ids": increment.tokens}


class Chunks(Writer):
    """Writes a stream. Plain increments are the event of another text with their own text in its place, so
    they have the bytes that `_built` returns."""

    def __init__(
        self, head: ReplyHead, options: StreamOptions, tally: UsageCounter, job: PreparedRequest
    ) -> None:
        super().__init__(tally)
        self._head = head
        self._options = options
        self._choices = len(job.requests)
        self._is_plain = head.prompts is None and not options.continuous_usage_stats
        self._ready: dict[int, tuple[str, str]] = {}  # by choice: what is around the text
        self._begun: set[int] = set()  # the choices of a completion whose prompts have been sent

    def opening(self) -> Iterable[bytes]:
        if self._head.kind == "chat":
            for index in range(self._choices):  # in order, which the openai SDK relies on
                yield event(self._with_usage(opening_chunk(self._head, index)))

    def grow(self, increment: Increment) -> Iterable[bytes]:
        text = self._plain_text(increment) if self._is_plain else None
        if text is None:
            return (self._built(increment),)
        around = self._ready.get(increment.choice)
        if around is None:
            around = self._ready[increment.choice] = self._around(increment)
        return (f"{around[0]}{encode_basestring_ascii(text)}{around[1]}".encode(),)

    def error(self, body: Mapping[str, object]) -> Iterable[bytes]:
        return (event(body, "error"),)

    async def close(self) -> Iterable[bytes]:
        if not self._options.include_usage:
            return (DONE,)
        return event({**self._head.chunk([]), "usage": self.tally.usage()}), DONE

    def _plain_text(self, increment: Increment) -> str | None:
        """Return the text if the event has nothing else to tell, or None."""
        if increment.growth.finish is not None or increment.growth.scored:
            return None
        if self._head.kind == "text":
            return increment.growth.text
        match increment.parts:
            case []:
                return ""
            case [Text(text)]:
                return text
            case _:
                return None

    def _around(self, increment: Increment) -> tuple[str, str]:
        marked = Increment(
            choice=increment.choice,
            growth=Growth(text=MARK, num_tokens=0),
            trace=increment.trace,
            parts=(Text(MARK),),
        )
        before, _, behind = self._built(marked).decode().rpartition(encode_basestring_ascii(MARK))
        return before, behind

    def _built(self, increment: Increment) -> bytes:
        choice = chunk_choice(self._head, increment)
        if (
            self._head.prompts is not None
            and self._head.kind == "text"
            and increment.choice not in self._begun
        ):
            self._begun.add(increment.choice)
            choice["prompt_token_ids"] = self._head.prompts[increment.choice]
        return event(self._with_usage(self._head.chunk([choice])))

    def _with_usage(self, chunk: Json) -> Json:
        if self._options.continuous_usage_stats:
            return {**chunk, "usage": self.tally.usage()}
        return {**chunk, "usage": None} if self._options.include_usage else chunk


def whole_reply(
    head: ReplyHead, job: PreparedRequest, choices: Sequence[Sequence[Increment]], usage: Json
) -> Json:
    """Return a whole reply; `choices` holds all increments of each."""
    returned = _returned(job, choices)
    whole = [
        whole_choice(head, index, choices[choice], logprobs=job.logprobs)
        for index, choice in enumerate(returned)
    ]
    body = {**head.whole(whole), "usage": usage}
    if head.prompts is not None:  # as in vLLM
        for row, choice in zip(whole, returned, strict=True):
            row["token_ids"] = [token for increment in choices[choice] for token in increment.tokens]
            if head.kind == "text":
                row["prompt_token_ids"] = head.prompts[choice]
        if head.kind == "chat":
            body["prompt_token_ids"] = head.prompts[0]
    if job.prompt_logprobs is None:
        return body
    scores = [
        prompt_logprobs(
            job.requests[choice].tokens,
            [score for increment in choices[choice] for score in increment.prompt_logprobs],
            job.prompt_logprobs,
            head.piece,
        )
        for choice in returned
    ]
    if head.kind == "chat":  # as in vLLM
        return {**body, "prompt_logprobs": scores[0]}
    for choice, score in zip(whole, scores, strict=True):
        choice["prompt_logprobs"] = score
    return body


def _returned(job: PreparedRequest, choices: Sequence[Sequence[Increment]]) -> list[int]:
    """Return the choices to send: of each prompt the best first, by logprob per token, if not all are
    wanted."""

    def per_token(choice: int) -> float:
        growths = [increment.growth for increment in choices[choice]]
        num_tokens = sum(growth.num_tokens for growth in growths)
        return sum(growth.logprob for growth in growths) / max(1, num_tokens)

    if job.best_of is None:
        return list(range(len(choices)))
    starts = range(0, len(choices), job.n)
    ranked = [sorted(range(start, start + job.n), key=per_token, reverse=True) for start in starts]
    return [choice for best in ranked for choice in best[: job.best_of]]


def whole_choice(head: ReplyHead, index: int, increments: Sequence[Increment], *, logprobs: bool) -> Json:
    body: Json = {"text": "".join(increment.growth.text for increment in increments)}
    if head.kind == "chat":
        parts = [part for increment in increments for part in increment.parts]
        body = {"message": _message(parts, head.call_id(index))}
    scored = [score for increment in increments for score in increment.growth.scored]
    return {
        "index": index,
        **body,
        "logprobs": head.logprobs(scored) if logprobs else None,
        "finish_reason": _finish(increments[-1]),
    }


def _delta(parts: Sequence[Part], call_id: str) -> Json:
    """Return the delta of a chunk. The first piece of a call has its id and name."""
    calls = [{"index": piece.index, **_piece(piece, call_id)} for piece in _calls(parts)]
    reasoning, words = _texts(parts)
    return {
        **({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}),
        **({"content": words} if words or not (reasoning or calls) else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _message(parts: Sequence[Part], call_id: str) -> Json:
    calls = [_piece(call, call_id) for call in _calls(parts)]
    reasoning, words = _texts(parts)
    return {
        "role": "assistant",
        "content": words if words or not calls else None,
        "refusal": None,
        **({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _texts(parts: Sequence[Part]) -> tuple[str, str]:
    """Return the reasoning and the text."""
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return reasoning, "".join(part.text for part in parts if isinstance(part, Text))


def _calls(parts: Sequence[Part]) -> list[Call]:
    return joined(part for part in parts if isinstance(part, Call))


def _piece(call: Call, call_id: str) -> Json:
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {
        "id": f"{call_id}-{call.index}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish(increment: Increment) -> str | None:
    finish = increment.growth.finish
    return "tool_calls" if finish == "stop" and increment.calls else finish
