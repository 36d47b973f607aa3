"""From a body to the requests that the service gets: everything is checked here, before anything is sent."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from tidemill.cluster.http.asker import Asker
from tidemill.cluster.http.protocol import Body, ChatBody, CompletionBody, unsupported_field
from tidemill.cluster.service import ServedModel
from tidemill.workers.api.answer import Ending
from tidemill.workers.api.params import SEED_BITS
from tidemill.workers.api.structured import grammar_of
from tidemill.workers.api.terms import Terms, requests_of, terms_of
from tidemill.workers.api.text import Tokenizer
from tidemill.workers.messages import Request, RequestError

REQUEST_CHOICES_MAX = 128
INLINE_CHARS_MAX = 8192
"""Longer texts are tokenized in a thread: this many take about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request. Choice c of prompt p is `requests[p * n + c]`."""

    requests: tuple[Request, ...]
    n: int
    ending: Ending
    logprobs: bool


class Intake:
    """Turns bodies into jobs for one served model."""

    def __init__(
        self, model: ServedModel, tokenizer: Tokenizer, new_id: Callable[[], str], rng: Random
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._new_id = new_id
        self._rng = rng

    async def chat(self, body: ChatBody, asker: Asker) -> Job:
        """Raises RequestError."""
        self._check(body)
        messages = [turn.message() for turn in body.messages]
        chars = sum(len(message.content) for message in messages)
        if chars + len(messages) <= INLINE_CHARS_MAX:
            tokens = self._tokenizer.chat(messages)
        else:
            tokens = await asyncio.to_thread(self._tokenizer.chat, messages)
        max_tokens = body.max_completion_tokens or body.max_tokens
        terms = self._terms(body, 1, max_tokens, body.num_logprobs())
        return self._job(terms, [tokens], "messages", asker.ttft_s_max, asker.tenant_with(body.cache_salt))

    async def completion(self, body: CompletionBody, asker: Asker) -> Job:
        """Raises RequestError."""
        self._check(body)
        prompts = [await self._encoded(prompt) for prompt in body.prompt]
        terms = self._terms(body, len(prompts), body.max_tokens, body.logprobs)
        return self._job(terms, prompts, "prompt", asker.ttft_s_max, asker.tenant_with(body.cache_salt))

    async def _encoded(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
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

    def check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            raise RequestError(
                f"there is no model {name!r} here: use {self._model.name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    def _terms(self, body: Body, num_prompts: int, max_tokens: int | None, logprobs: int | None) -> Terms:
        if num_prompts * body.n > REQUEST_CHOICES_MAX:
            raise RequestError(
                f"{num_prompts} prompts with n = {body.n}: ask for at most {REQUEST_CHOICES_MAX} answers",
                param="n",
            )
        grammar = grammar_of(body.response_format, body.structured_outputs, body.guided())
        seed = self._rng.getrandbits(SEED_BITS)
        return replace(
            terms_of(body, self._model, seed=seed, logprobs=logprobs, grammar=grammar),
            max_tokens=max_tokens,
            salt=body.cache_salt or "",
            priority=body.priority,
        )

    def _job(
        self, terms: Terms, prompts: list[list[int]], param: str, ttft_s_max: float | None, tenant: str
    ) -> Job:
        requests = tuple(
            replace(request, tenant=tenant, ttft_s_max=ttft_s_max)
            for prompt in prompts
            for request in requests_of(terms, self._model, prompt, param, self._new_id)
        )
        logprobs = terms.sampling.logprobs is not None
        return Job(requests=requests, n=terms.n, ending=terms.ending, logprobs=logprobs)
