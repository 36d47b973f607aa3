"""From a body to the requests that the service gets: everything is checked here, before anything is sent."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from tidemill.cluster.http.protocol import SEED_BITS, Body, ChatBody, CompletionBody, unsupported_field
from tidemill.cluster.http.text import Message, Tokenizer
from tidemill.cluster.service import ServedModel
from tidemill.workers.messages import Request, RequestError, Sampling

REQUEST_CHOICES_MAX = 128
INLINE_CHARS_MAX = 8192
"""Longer texts are tokenized in a thread: this many take about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request. Choice c of prompt p is `requests[p * n + c]`."""

    requests: tuple[Request, ...]
    n: int
    stops: tuple[str, ...]


class Intake:
    """Turns bodies into jobs for one served model."""

    def __init__(
        self, model: ServedModel, tokenizer: Tokenizer, new_id: Callable[[], str], rng: Random
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._new_id = new_id
        self._rng = rng

    async def chat(self, body: ChatBody) -> Job:
        """Raises RequestError."""
        self._check(body)
        messages = [
            Message("system" if turn.role == "developer" else turn.role, turn.content)
            for turn in body.messages
        ]
        chars = sum(len(message.content) for message in messages)
        if chars + len(messages) <= INLINE_CHARS_MAX:
            tokens = self._tokenizer.chat(messages)
        else:
            tokens = await asyncio.to_thread(self._tokenizer.chat, messages)
        return self._job(body, [tokens], "messages", body.max_completion_tokens or body.max_tokens)

    async def completion(self, body: CompletionBody) -> Job:
        """Raises RequestError."""
        self._check(body)
        prompts = [await self._encoded(prompt) for prompt in body.prompt]
        return self._job(body, prompts, "prompt", body.max_tokens)

    async def _encoded(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            self._check_tokens(prompt, "prompt")
            return prompt
        if len(prompt) <= INLINE_CHARS_MAX:
            return self._tokenizer.encode(prompt)
        return await asyncio.to_thread(self._tokenizer.encode, prompt)

    def _check(self, body: Body) -> None:
        self.check_model(body.model)
        field = unsupported_field(body.model_extra or {})
        if field is not None:
            raise RequestError(
                f"{field} is not supported yet: leave it out", param=field, code="unsupported_parameter"
            )
        self._check_tokens(body.stop_token_ids, "stop_token_ids")

    def check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            raise RequestError(
                f"there is no model {name!r} here: use {self._model.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._model.vocab_size):
            raise RequestError(
                f"{param} holds ids outside of the vocabulary: use 0 to {self._model.vocab_size - 1}",
                param=param,
            )

    def _job(self, body: Body, prompts: list[list[int]], param: str, max_tokens: int | None) -> Job:
        if len(prompts) * body.n > REQUEST_CHOICES_MAX:
            raise RequestError(
                f"{len(prompts)} prompts with n = {body.n}: ask for at most {REQUEST_CHOICES_MAX} answers",
                param="n",
            )
        allowances = [self._allowance(len(prompt), param, max_tokens) for prompt in prompts]
        seed = self._rng.getrandbits(SEED_BITS) if body.seed is None else body.seed
        eos = () if body.ignore_eos else self._model.eos_token_ids
        requests = tuple(
            Request(
                request_id=self._new_id(),
                tokens=tuple(prompt),
                max_new_tokens=allowance,
                sampling=Sampling(
                    temperature=body.temperature,
                    top_k=max(body.top_k, 0),
                    top_p=body.top_p,
                    min_p=body.min_p,
                    seed=choice_seed(seed, choice),
                ),
                stop_token_ids=(*eos, *body.stop_token_ids),
                salt=body.cache_salt or "",
            )
            for prompt, allowance in zip(prompts, allowances, strict=True)
            for choice in range(body.n)
        )
        return Job(requests=requests, n=body.n, stops=tuple(body.stop))

    def _allowance(self, num_tokens: int, param: str, max_tokens: int | None) -> int:
        """How many tokens may follow a prompt of `num_tokens`."""
        if num_tokens == 0:
            raise RequestError(f"{param} is empty: give at least one token", param=param)
        left = self._model.max_model_len - num_tokens
        if max_tokens is None and left > 0:
            return left
        if max_tokens is None or max_tokens > left:
            asked = "" if max_tokens is None else f" and max_tokens {max_tokens}"
            raise RequestError(
                f"{num_tokens} prompt tokens{asked} exceed the {self._model.max_model_len} tokens that this "
                "model takes in all: shorten the prompt or lower max_tokens",
                param=param,
                code="context_length_exceeded",
            )
        return max_tokens


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one of the `n` answers, in [0, 2 ** 63): another one for each, the same at each repetition."""
    digest = blake2b(
        seed.to_bytes(8, "little", signed=True) + choice.to_bytes(4, "little"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
