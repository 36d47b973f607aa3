"""Turns a body into requests for the service. All checks happen here, before anything is sent."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import ParamSpec, TypeVar

from tidemill.cluster.edge.chat.formats import CALL_END, FINAL, RETURN, START
from tidemill.cluster.edge.chat.output.detokenizer import Ending
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.request.params import SEED_BITS, session_of
from tidemill.cluster.edge.chat.request.request_builder import GenerationTerms, requests_of, terms_of
from tidemill.cluster.edge.chat.request.structured import grammar_of
from tidemill.cluster.edge.chat.request.tool_grammar import forced
from tidemill.cluster.edge.chat.request.tools import Tool, offered
from tidemill.cluster.edge.chat.text import (
    MarkedPrompt,
    Message,
    Rendering,
    Tokenizer,
    check_chars,
    marked_prompt,
    text_of,
)
from tidemill.cluster.edge.flow import content_hash_of
from tidemill.cluster.edge.requests.bodies import (
    UNSUPPORTED,
    Body,
    ChatBody,
    CompletionBody,
    PrefixBody,
    TokenizeBody,
    unsupported_field,
)
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.echo import Prompt
from tidemill.cluster.edge.service import ServedModel
from tidemill.workers.messages import Grammar, Request, RequestError, Sampling

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

REQUEST_CHOICES_MAX = 128
TAIL_TOKENS = 8
"""The end of a prompt that shows whether it ends in a tag and white space, or in the head of a message."""

ROLE = "assistant"
"""The role of the messages that a model in channels answers with."""

PROMPT_LOGPROBS_MAX = 1 << 18
"""The most prompt logprobs of one request, over all prompts, answers and alternatives: some 30 MiB."""

TOKENIZED_MAX = 1 << 18
"""The most tokens that are returned as such, or as many as the model takes."""

INLINE_CHARS_MAX = 8192
"""Longer texts are tokenized in a thread: this many characters take about a millisecond."""

MESSAGE_CHARS = 64
"""The characters that take as long to tokenize as a message to render, several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One HTTP request. Choice c of prompt p is `requests[p * n + c]`. `output_format` is None for
    completions, whose text is returned as it is, behind its prompt if there are `echoes`."""

    requests: tuple[Request, ...]
    n: int
    ending: Ending
    logprobs: bool
    best_of: int | None = None  # the answers drawn, of which the n best are returned; None: all
    prompt_logprobs: int | None = None  # alternatives per token in a separate list
    output_format: OutputFormat | None = None
    echoes: tuple[Prompt, ...] | None = None
    token_ids: bool = False  # whether the reply has them
    ignored: tuple[str, ...] = ()  # fields without an effect


class Intake:
    """Turns bodies into requests for one served model."""

    def __init__(
        self, model: ServedModel, tokenizer: Tokenizer, new_id: Callable[[], str], rng: Random
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._new_id = new_id
        self._rng = rng
        self._threads = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2), "texts")

    async def chat(self, body: ChatBody, caller: Caller) -> PreparedRequest:
        """Prepare a chat. Raises RequestError."""
        self._check(body)
        tools = offered(body.tools, body.tool_choice)
        grammar = grammar_of(body.response_format, body.structured_outputs, body.guided())
        max_tokens = body.max_completion_tokens or body.max_tokens
        prompt = self._cut(await self._rendered(body, tools, self._opening(body, grammar)), body, max_tokens)
        output_format = self._output_format(body, tools, prompt.tokens, grammar)
        if body.tool_choice not in ("auto", "none"):
            if grammar is not None:
                raise RequestError(
                    "tool_choice forces a call, and another field restricts the answer: give one",
                    param="tool_choice",
                )
            grammar = forced(tools, output_format, self._tokenizer.added)
        terms = self._terms(body, 1, max_tokens, body.num_logprobs(), grammar)
        if output_format.channels and not body.ignore_eos:
            ends = (self._tokenizer.added.get(tag) for tag in (RETURN, CALL_END))
            more = (token for token in ends if token is not None and token not in terms.stop_token_ids)
            terms = replace(terms, stop_token_ids=(*terms.stop_token_ids, *more))
        job = self._job(terms, [prompt], "messages", body, caller)
        return replace(job, output_format=output_format)

    async def prefix(self, body: PrefixBody, caller: Caller) -> tuple[PreparedRequest, str]:
        """Prepare a prompt that is retained and whose answer, one token, no client sees; return also its id.
        Raises RequestError."""
        self._check(body)
        if not self._model.prefix_caching:
            raise RequestError("this model keeps no prefixes: serve it without --no-enable-prefix-caching")
        if body.prompt is not None:
            prompt = await self._encoded(body.prompt, body.cache_breakpoints)
        else:
            prompt = await self._rendered(body, offered(body.tools, body.tool_choice), answers=False)
        terms = replace(self._terms(body, 1, 1, None, None), n=1, sampling=Sampling(temperature=0.0))
        job = self._job(terms, [prompt], "messages" if body.prompt is None else "prompt", body, caller)
        (request,) = job.requests
        prefix_id = f"prefix-{content_hash_of(request).hex()}"
        session = session_of(request.tenant, "prefix", prefix_id)
        request = replace(request, retain_s=body.retained_s, session=session)
        ignored = (*job.ignored, *body.unused())
        return replace(job, requests=(request,), ignored=ignored, prompt_logprobs=None), prefix_id

    async def prompt_of(self, body: TokenizeBody) -> list[int]:
        """Return the tokens of a chat or of a text. Raises RequestError."""
        if body.prompt is not None:
            prompt = await self._encoded(body.prompt)
        else:
            prompt = await self._rendered(body, offered(body.tools, body.tool_choice))
        most = max(TOKENIZED_MAX, self._model.max_model_len)
        if len(prompt.tokens) > most:
            count = f"{len(prompt.tokens):,}"
            raise RequestError(f"the text has {count} tokens: send a part of at most {most:,}")
        return prompt.tokens

    def _opening(self, body: ChatBody, grammar: Grammar | None) -> str:
        """Return the beginning of the answer: an answer that must match a grammar is text from its first
        token on."""
        asked = grammar is not None and self._tokenizer.style.in_channels
        return FINAL if asked and not body.continue_final_message else ""

    async def _rendered(
        self, body: ChatBody, tools: list[Tool], begun: str = "", *, answers: bool = True
    ) -> MarkedPrompt:
        """Return the tokens of a chat; `answers` up to the start of the answer, if the body names no end."""
        shown = partial(self._shown, body, tools, begun, answers)
        if MESSAGE_CHARS * len(body.messages) > INLINE_CHARS_MAX:
            return await self.in_thread(lambda: self._tokenizer.chat(*shown()))
        messages, how = shown()
        chars = sum(len(message.content) for message in messages) + MESSAGE_CHARS * len(messages)
        is_plain = not (
            tools or how.options or how.message_marks or any(message.more for message in messages)
        )
        if is_plain and chars <= INLINE_CHARS_MAX:
            return self._tokenizer.chat(messages, how)
        return await self.in_thread(self._tokenizer.chat, messages, how)

    def _shown(
        self,
        body: ChatBody,
        tools: list[Tool],
        begun: str,
        answers: bool,  # noqa: FBT001 - see `_rendered`
    ) -> tuple[list[Message], Rendering]:
        """Return what a template gets. Raises RequestError."""
        messages = [turn.message() for turn in body.messages]
        continues = body.continue_final_message
        how = Rendering(
            tools=[tool.shown() for tool in tools],
            answers=(answers and not continues)
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continues=continues,
            options={**body.effort(), **body.chat_template_kwargs},
            begun=begun,
            chars_max=self._chars_max,
            message_marks=[
                (index, chars) for index, turn in enumerate(body.messages) for chars, _ in turn.marks
            ],
            tool_marks=[count for count, tool in enumerate(tools, 1) if tool.cache_control is not None],
        )
        if how.answers and continues:
            raise RequestError(
                "add_generation_prompt starts an answer, continue_final_message goes on with one: give one",
                param="continue_final_message",
            )
        check_chars(sum(len(message.content) for message in messages), self._chars_max, "messages")
        return messages, how

    def _output_format(
        self, body: ChatBody, tools: list[Tool], tokens: list[int], grammar: Grammar | None
    ) -> OutputFormat:
        style = self._tokenizer.style
        tail = text_of(self._tokenizer, tokens[-TAIL_TOKENS:])
        reasoning = style.reasoning if grammar is None or style.in_channels else None
        return OutputFormat(
            reasoning=reasoning,
            thinking=reasoning is not None and reasoning.open_behind(tail),
            form=style.form if tools else None,
            calls_max=None if body.parallel_tool_calls and isinstance(body.tool_choice, str) else 1,
            schemas={tool.function.name: tool.function.parameters or {} for tool in tools},
            channels=style.in_channels,
            begun=FINAL if body.continue_final_message else tail.rpartition(START)[2].removeprefix(ROLE),
        )

    async def completion(self, body: CompletionBody, caller: Caller) -> PreparedRequest:
        """Prepare a completion. Raises RequestError."""
        self._check(body)
        whole = [await self._encoded(prompt, body.cache_breakpoints) for prompt in body.prompt]
        prompts = [self._cut(prompt, body, body.max_tokens) for prompt in whole]
        grammar = grammar_of(body.response_format, body.structured_outputs, body.guided())
        num_drawn = body.num_drawn()
        logprobs = 0 if body.logprobs is None and num_drawn > body.n else body.logprobs
        terms = self._terms(body, len(prompts), body.num_tokens(), logprobs, grammar)
        terms = replace(terms, n=num_drawn)
        if body.echo and body.logprobs is not None:
            scored = max(body.logprobs, body.prompt_logprobs or 0)
            terms = replace(
                terms,
                sampling=replace(terms.sampling, prompt_logprobs=scored),
                ending=replace(terms.ending, scores_stop=True),
            )
        job = self._job(terms, prompts, "prompt", body, caller)
        job = replace(job, logprobs=body.logprobs is not None)
        return replace(job, echoes=await self.in_thread(self._echoes, body, prompts)) if body.echo else job

    def _echoes(self, body: CompletionBody, prompts: list[MarkedPrompt]) -> tuple[Prompt, ...]:
        return tuple(
            Prompt(
                text=given
                if isinstance(given, str) and body.truncate_prompt_tokens is None
                else text_of(self._tokenizer, prompt.tokens),
                tokens=prompt.tokens,
                alternatives=body.logprobs,
                alone=body.max_tokens == 0,
            )
            for given, prompt in zip(body.prompt, prompts, strict=True)
        )

    async def _encoded(self, prompt: str | list[int], breakpoints: Sequence[int] = ()) -> MarkedPrompt:
        if isinstance(prompt, str):
            check_chars(len(prompt), self._chars_max, "prompt")
            if len(prompt) > INLINE_CHARS_MAX:
                return await self.in_thread(marked_prompt, self._tokenizer, prompt, breakpoints)
        return marked_prompt(self._tokenizer, prompt, breakpoints)

    def _cut(self, prompt: MarkedPrompt, body: Body, max_tokens: int | None) -> MarkedPrompt:
        """Return the part of the prompt that truncate_prompt_tokens leaves. Raises RequestError."""
        most = body.truncate_prompt_tokens
        room = self._model.max_model_len - (max_tokens or 1)
        if most is None:
            return prompt
        if most > room:
            raise RequestError(
                f"truncate_prompt_tokens {most} leaves no room for the answer: set it to {room} or less",
                param="truncate_prompt_tokens",
            )
        return prompt.cut(max(0, room) if most < 0 else most, at_start=body.truncation_side != "right")

    async def in_thread(
        self, work: Callable[_Args, _Result], *args: _Args.args, **options: _Args.kwargs
    ) -> _Result:
        """Do something long, a few at a time: texts take up to a kilobyte per character meanwhile, and each
        thread that waits for the interpreter delays streams.

        They are always the same threads: malloc keeps what a text took for the thread that took it.
        """
        call = partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @property
    def _chars_max(self) -> int:
        """Return the characters of the longest text that the model may take."""
        return self._model.max_model_len * self._tokenizer.token_chars_max

    def _check(self, body: Body) -> None:
        body.check_marks()
        field = unsupported_field(body.model_extra or {})
        if field is not None:
            raise RequestError(
                f"{field} is not supported yet: leave it out", param=field, code="unsupported_parameter"
            )

    def _terms(
        self,
        body: Body,
        num_prompts: int,
        max_tokens: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
    ) -> GenerationTerms:
        num_drawn = body.num_drawn() if isinstance(body, CompletionBody) else body.n
        if num_prompts * num_drawn > REQUEST_CHOICES_MAX:
            raise RequestError(
                f"{num_prompts} prompts with n = {num_drawn}: ask for at most {REQUEST_CHOICES_MAX} answers",
                param="n",
            )
        if body.prompt_logprobs is not None and body.stream:
            raise RequestError(
                "prompt_logprobs are no part of a stream: do not stream, or use echo with logprobs",
                param="prompt_logprobs",
            )
        seed = self._rng.getrandbits(SEED_BITS)
        return replace(
            terms_of(
                body,
                self._model,
                self._tokenizer.encode_inside,
                seed=seed,
                logprobs=logprobs,
                grammar=grammar,
            ),
            max_tokens=max_tokens,
            priority=body.sort_class(),
        )

    def _job(
        self, terms: GenerationTerms, prompts: list[MarkedPrompt], param: str, body: Body, caller: Caller
    ) -> PreparedRequest:
        salt = body.salt()
        terms = replace(terms, salt=caller.salt_with(salt))
        tenant = caller.tenant_with(salt)
        sent = {
            "tenant": tenant,
            "ttft_s_max": caller.ttft_s_max,
            "trace_parent": caller.trace_parent,
            "retain_s": body.retain_s(),
            "session": body.session(tenant),
        }
        requests = tuple(
            replace(request, **sent)
            for prompt in prompts
            for request in requests_of(terms, self._model, prompt, param, self._new_id)
        )
        if not self._model.prefix_caching:
            requests = tuple(
                replace(request, salt=f"{request.salt}/{request.request_id}") for request in requests
            )
        numbers = sum(
            request.to_score * (1 + (request.sampling.prompt_logprobs or 0)) for request in requests
        )
        if numbers > PROMPT_LOGPROBS_MAX:
            raise RequestError(
                f"{numbers} logprobs of prompts in one request: ask for at most {PROMPT_LOGPROBS_MAX}, with "
                "fewer or shorter prompts, fewer answers or fewer alternatives",
                param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
            )
        return PreparedRequest(
            requests=requests,
            n=terms.n,
            best_of=body.n if body.n < terms.n else None,
            ending=terms.ending,
            logprobs=terms.sampling.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=body.return_token_ids,
            ignored=body.ignored(UNSUPPORTED),
        )
