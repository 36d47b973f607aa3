"""The JSON that clients read: chunks of a stream, whole answers, usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from tidemill.cluster.http.answers import Increment
from tidemill.cluster.http.intake import Job
from tidemill.cluster.http.logprobs import Piece, chat_logprobs, completion_logprobs
from tidemill.workers.api.answer import Growth, Scored
from tidemill.workers.messages import Provenance, Trace

Json = dict[str, object]
Kind = Literal["chat", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every chunk of one reply repeats."""

    kind: Kind
    reply_id: str
    created_s: int  # unix time
    model: str
    piece: Piece  # the bytes of a token

    def logprobs(self, scored: Sequence[Scored]) -> Json:
        write = chat_logprobs if self.kind == "chat" else completion_logprobs
        return write(scored, self.piece)

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


def opening_choice(index: int) -> Json:
    """What comes before the text of a chat's choice."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def chunk_choice(head: Head, increment: Increment) -> Json:
    growth = increment.growth
    match head.kind:
        case "chat":
            text: Json = {"delta": {"content": growth.text}}
        case "text":
            text = {"text": growth.text}
        case _:
            assert_never(head.kind)
    logprobs = head.logprobs(growth.scored) if growth.scored else None
    return {"index": increment.choice, **text, "logprobs": logprobs, "finish_reason": growth.finish}


def whole_choice(head: Head, index: int, growths: Sequence[Growth], *, logprobs: bool) -> Json:
    text = "".join(growth.text for growth in growths)
    match head.kind:
        case "chat":
            body: Json = {"message": {"role": "assistant", "content": text, "refusal": None}}
        case "text":
            body = {"text": text}
        case _:
            assert_never(head.kind)
    scored = [one for growth in growths for one in growth.scored]
    return {
        "index": index,
        **body,
        "logprobs": head.logprobs(scored) if logprobs else None,
        "finish_reason": growths[-1].finish,
    }


class Tally:
    """Counts the tokens of a job for its usage. A prompt with several answers counts once, for the first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._traces: dict[int, Trace] = {}
        self._completion_tokens = 0

    def saw(self, increment: Increment) -> None:
        self._completion_tokens += increment.growth.num_tokens
        self._traces.setdefault(increment.choice, increment.trace)

    def usage(self) -> Json:
        """As OpenAI has it, and where the prompt's tokens came from.

        prefilled_tokens and replayed_tokens were computed for this request, by the prefill worker and by the
        decode worker; fetched_tokens came to the decode worker from the store; reused_tokens it already had.
        """
        prompts = range(0, len(self._job.requests), self._job.n)
        prompt_tokens = sum(len(self._job.requests[index].tokens) for index in prompts)
        ways = [self._traces[index] for index in prompts if index in self._traces]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(
                    cached_tokens(len(self._job.requests[index].tokens), self._traces[index])
                    for index in prompts
                    if index in self._traces
                ),
                "prefilled_tokens": sum(_produced(way).computed_tokens for way in ways),
                "fetched_tokens": sum(way.provenance.fetched_tokens for way in ways),
                "replayed_tokens": sum(way.provenance.computed_tokens for way in ways),
                "reused_tokens": sum(way.provenance.reused_tokens for way in ways),
            },
        }


def cached_tokens(prompt_tokens: int, trace: Trace) -> int:
    """Tokens of a prompt that nobody computed for this request."""
    return max(0, prompt_tokens - _produced(trace).computed_tokens - trace.provenance.computed_tokens)


def _produced(trace: Trace) -> Provenance:
    return trace.produced.provenance if trace.produced else Provenance()
