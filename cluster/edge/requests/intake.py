"""Turns a body into requests for the service. All checks happen here, before anything is sent."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal, ParamSpec, TypeVar

from tidemill.cluster.edge.cache_misses import Show
from tidemill.cluster.edge.chat.formats import CALL_END, FINAL, RETURN, START, Thinking
from tidemill.cluster.edge.chat.output.detokenizer import Ending
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.request.answer_grammar import ROLE, behind_thought, words_or_calls
from tidemill.cluster.edge.chat.request.params import RETAIN_S, SEED_BITS, session_of
from tidemill.cluster.edge.chat.request.request_builder import (
    GenerationTerms,
    Sender,
    requests_of,
    sampling_of,
    terms_of,
)
from tidemill.cluster.edge.chat.request.tool_grammar import enforceable, forced
from tidemill.cluster.edge.chat.request.tools import Tool, offered
from tidemill.cluster.edge.chat.text import MarkedPrompt, Message, Rendering, check_chars
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer, marked_prompt, text_of
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

PROMPT_LOGPROBS_MAX = 1 << 18
"""The most prompt logprobs of one request, over all prompts, answers and alternatives: some 30 MiB."""

TOKENIZED_MAX = 1 << 18
"""The most tokens that are returned as such, or as many as the model takes."""

INLINE_CHARS_MAX = 8192
"""Longer texts are tokenized in a thread: this many characters take about a millisecond."""

POOLED_MAX = 64
"""The prompts of one request that are pooled concurrently."""

NOTHING_DRAWN = GenerationTerms(
    sampling=Sampling(temperature=0.0), ending=Ending(), stop_token_ids=(), max_tokens=0, n=1
)

MESSAGE_CHARS = 64
"""The characters that take as long to tokenize as a message to render, several times."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The tokens of a body, and the field that they came in."""

    prompts: list[MarkedPrompt]
    param: Literal["messages", "prompt", "input", "token_ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One HTTP request. Choice c of prompt p is `requests[p * n + c]`. `output_format` is None for
    completions, whose text is returned as it is, behind its prompt if there are `echoes`."""

    requests: tuple[Request, ...]
    n: int
    ending: Ending
    logprobs: bool = False
    best_of: int | None = None  # the answers drawn, of which the n best are returned; None: all
    prompt_logprobs: int | None = None  # alternatives per token in a separate list
    output_format: OutputFormat | None = None
    echoes: tuple[Prompt, ...] | None = None
    token_ids: bool = False  # whether the reply has them
    special_tokens: bool = False  # whether they have texts
    concurrent_max: int = REQUEST_CHOICES_MAX  # the others wait for these
    ignored: tuple[str, ...] = ()  # fields without an effect
    show: Show | None = None  # for clients that want diagnostics with their own text


class Intake:
    """Turns bodies into requests for one served model.

    body --_rendered--> Rendered --_sampling, terms_of--> GenerationTerms --_requests--> PreparedRequest
    """

    def __init__(
        self, model: ServedModel, tokenizer: FolderTokenizer, new_id: Callable[[], str], rng: Random
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._new_id = new_id
        self._rng = rng
        self._threads = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2), "texts")

    async def chat(self, body: ChatBody, caller: Caller) -> PreparedRequest:
        """Prepare a chat. Raises RequestError."""
        self._check(body)
        tools = self._offered(body)
        forces = body.tool_choice not in ("auto", "none")
        asked = None if forces else body.asked()
        grammar = None if asked is None else asked.grammar
        left_out = () if asked is None else asked.left_out
        max_tokens = body.max_completion_tokens or body.max_tokens
        prompt = self._cut(await self._chat_prompt(body, tools), body, max_tokens)
        output_format = self._output_format(body, tools, prompt.tokens, constrained=forces or bool(asked))
        if forces:  # it goes before what else restricts the answer
            tools, left_out = enforceable(tools)
            calls = forced(tools, output_format, self._tokenizer.added)
            grammar = behind_thought(calls, output_format, self._tokenizer.added)
            left_out += body.restrictions()
        elif grammar is not None:
            grammar = words_or_calls(grammar, tools, output_format, self._tokenizer.added)
        logprobs = body.num_logprobs()
        sampling = self._sampling(body, logprobs, body.prompt_logprobs, grammar)
        ends = self._channel_ends() if output_format.channels and not body.ignore_eos else ()
        terms = terms_of(body, self._model, sampling, max_tokens=max_tokens, n=body.n, ends=ends)
        dropped = ["tools"] if self._drops_tools(body) else []
        job = self._prepared(body, caller, terms, Rendered([prompt], "messages"), (*dropped, *left_out))
        show = self._show(caller)
        return replace(job, logprobs=logprobs is not None, output_format=output_format, show=show)

    async def prefix(self, body: PrefixBody, caller: Caller) -> tuple[PreparedRequest, str]:
        """Prepare a prompt that is retained and whose answer, one token, no client sees; return also its id.
        Raises RequestError."""
        self._check(body)
        if not self._model.prefix_caching:
            raise RequestError("this model keeps no prefixes: serve it without --no-enable-prefix-caching")
        rendered = await self._rendered(body, body.cache_breakpoints, answers=False)
        self._sampling(body)  # a check: the one token is always the likeliest
        terms = terms_of(body, self._model, Sampling(temperature=0.0), max_tokens=1, n=1)
        (prompt,) = rendered.prompts
        sender = self._sender(body, caller)
        (unsent,) = requests_of(terms, self._model, prompt, rendered.param, str, sender)
        prefix_id = f"prefix-{content_hash_of(unsent).hex()}"
        return self._prepared(body, caller, terms, rendered, body.unused(), prefix_id), prefix_id

    async def pooled(
        self,
        body: Body,
        prompts_of: Callable[[FolderTokenizer], list[MarkedPrompt]],
        caller: Caller,
        ignored: Sequence[str],
    ) -> PreparedRequest:
        """Prepare prompts for which the model pools. `prompts_of` runs in a thread. Raises RequestError."""
        self._check(body, pools=True)
        prompts = await self.in_thread(prompts_of, self._tokenizer)
        job = self._prepared(body, caller, NOTHING_DRAWN, Rendered(prompts, "input"), ignored)
        requests = tuple(replace(request, pools=True) for request in job.requests)
        return replace(job, requests=requests, concurrent_max=POOLED_MAX)

    async def prompt_of(self, body: TokenizeBody) -> list[int]:
        """Return the tokens of a chat or of a text. Raises RequestError."""
        (prompt,) = (await self._rendered(body)).prompts
        most = max(TOKENIZED_MAX, self._model.max_model_len)
        if len(prompt.tokens) > most:
            count = f"{len(prompt.tokens):,}"
            raise RequestError(f"the text has {count} tokens: send a part of at most {most:,}")
        return prompt.tokens

    def _drops_tools(self, body: ChatBody) -> bool:
        """Return whether the model does without the tools that it may call: it knows none."""
        return bool(body.tools) and body.tool_choice == "auto" and not self._tokenizer.takes_tools

    def _offered(self, body: ChatBody) -> list[Tool]:
        return [] if self._drops_tools(body) else offered(body.tools, body.tool_choice)

    async def _rendered(
        self, body: TokenizeBody | PrefixBody, breakpoints: Sequence[int] = (), *, answers: bool = True
    ) -> Rendered:
        """Return the tokens of the prompt or of the messages, of which a body has one."""
        if body.prompt is not None:
            return Rendered([await self._encoded(body.prompt, breakpoints)], "prompt")
        tools = self._offered(body)
        return Rendered([await self._chat_prompt(body, tools, answers=answers)], "messages")

    async def _chat_prompt(self, body: ChatBody, tools: list[Tool], *, answers: bool = True) -> MarkedPrompt:
        """Return the tokens of a chat; `answers` up to the start of the answer, if the body names no end."""
        shown = partial(self._shown, body, tools, answers=answers)
        if MESSAGE_CHARS * len(body.messages) > INLINE_CHARS_MAX:
            return await self.in_thread(lambda: self._tokenizer.chat(*shown()))
        messages, how = shown()
        chars = sum(len(message.content) for message in messages) + MESSAGE_CHARS * len(messages)
        is_plain = not (
            tools or how.options or how.message_marks or any(message.more for message in messages)
        )
        if is_plain and chars <= INLINE_CHARS_MAX and self._tokenizer.renders_inline:
            return self._tokenizer.chat(messages, how)
        return await self.in_thread(self._tokenizer.chat, messages, how)

    def _shown(self, body: ChatBody, tools: list[Tool], *, answers: bool) -> tuple[list[Message], Rendering]:
        """Return what a template gets. Raises RequestError."""
        messages = [turn.message() for turn in body.messages]
        continues = body.continue_final_message
        how = Rendering(
            tools=[tool.shown() for tool in tools],
            answers=(answers and not continues)
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continues=continues,
            options=body.template_options(),
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
        self, body: ChatBody, tools: list[Tool], tokens: list[int], *, constrained: bool
    ) -> OutputFormat:
        """Return the format. A thought before an answer that is `constrained` is one only where the model may
        think."""
        style = self._tokenizer.style
        reasoning, tail = style.reasoning, text_of(self._tokenizer, tokens[-TAIL_TOKENS:])
        thinking = reasoning is not None and reasoning.open_behind(tail)
        thinks = thinking or (reasoning is not None and self._may_think(body, reasoning, tail))
        return OutputFormat(
            reasoning=reasoning if thinks or not constrained else None,
            thinking=thinking,
            form=style.form if tools else None,
            calls_max=None if body.parallel_tool_calls and isinstance(body.tool_choice, str) else 1,
            schemas={tool.function.name: tool.function.parameters or {} for tool in tools},
            forced=body.tool_choice not in ("auto", "none"),
            constrained=constrained,
            channels=style.in_channels,
            begun=FINAL if body.continue_final_message else tail.rpartition(START)[2].removeprefix(ROLE),
        )

    def _may_think(self, body: ChatBody, reasoning: Thinking, tail: str) -> bool:
        """Return whether an answer may begin a thought: by a token, or where the client asks for it. Models
        that do not reason would write on in a thought."""
        asked = body.thinks()
        if asked is not None or reasoning.closed_behind(tail):
            return bool(asked) and not reasoning.closed_behind(tail)
        return not reasoning.opens or any(tag in self._tokenizer.added for tag in reasoning.opens)

    async def completion(self, body: CompletionBody, caller: Caller) -> PreparedRequest:
        """Prepare a completion. Raises RequestError."""
        self._check(body)
        whole = [await self._encoded(prompt, body.cache_breakpoints) for prompt in body.prompt]
        prompts = [self._cut(prompt, body, body.max_tokens) for prompt in whole]
        asked = body.asked()
        grammar = None if asked is None else asked.grammar
        num_drawn = body.num_drawn()
        logprobs = 0 if body.logprobs is None and num_drawn > body.n else body.logprobs
        max_tokens = body.num_tokens()
        if len(prompts) * num_drawn > REQUEST_CHOICES_MAX:
            raise RequestError(
                f"{len(prompts)} prompts with n = {num_drawn}: ask for at most {REQUEST_CHOICES_MAX} answers",
                param="n",
            )
        scored, shows_scores = body.prompt_logprobs, body.echo and body.logprobs is not None
        if shows_scores:
            scored = max(body.logprobs or 0, scored or 0)
        sampling = self._sampling(body, logprobs, scored, grammar)
        terms = terms_of(
            body, self._model, sampling, max_tokens=max_tokens, n=num_drawn, scores_stop=shows_scores
        )
        left_out = asked.left_out if asked else ()
        job = self._prepared(body, caller, terms, Rendered(prompts, body.prompt_param), left_out)
        return replace(
            job,
            best_of=body.n if body.n < num_drawn else None,
            logprobs=body.logprobs is not None,
            show=self._show(caller),
            echoes=await self.in_thread(self._echoes, body, prompts) if body.echo else None,
        )

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

    def _check(self, body: Body, *, pools: bool = False) -> None:
        if self._model.pooling is not None and not pools:
            raise RequestError(
                f"the model {self._model.name} is for embeddings and scores: use /v1/embeddings, /v1/rerank "
                "or /v1/score",
                param="model",
            )
        body.check_marks()
        field = unsupported_field(body.model_extra or {})
        if field is not None:
            raise RequestError(
                f"{field} is not supported yet: leave it out", param=field, code="unsupported_parameter"
            )

    def _channel_ends(self) -> list[int]:
        """Return the tokens that end an answer in channels."""
        ends = (self._tokenizer.added.get(tag) for tag in (RETURN, CALL_END))
        return [token for token in ends if token is not None]

    def _sampling(
        self,
        body: Body,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> Sampling:
        if body.prompt_logprobs is not None and body.stream:
            raise RequestError(
                "prompt_logprobs are no part of a stream: do not stream, or use echo with logprobs",
                param="prompt_logprobs",
            )
        defaults = self._tokenizer.defaults
        unset = {name: value for name, value in defaults.items() if name not in body.model_fields_set}
        return sampling_of(
            body.model_copy(update=unset) if unset else body,
            self._model,
            self._tokenizer.encode_inside,
            seed=self._rng.getrandbits(SEED_BITS),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )

    def _show(self, caller: Caller) -> Show | None:
        return partial(text_of, self._tokenizer) if caller.diagnostics == "text" else None

    def _sender(self, body: Body, caller: Caller, prefix_id: str = "") -> Sender:
        """Return the sender; what is kept is the prefix of that id, if one is given. Raises RequestError."""
        salt = body.salt()
        tenant = caller.tenant_with(salt)
        return Sender(
            tenant=tenant,
            salt=caller.salt_with(salt),
            shares_prefixes=self._model.prefix_caching,
            priority=body.sort_class(),
            ttft_s_max=caller.ttft_s_max,
            trace_parent=caller.trace_parent,
            retain_s=body.retain_s() or (RETAIN_S if caller.session else 0.0),
            session=session_of(tenant, "prefix", prefix_id)
            if prefix_id
            else body.session(tenant) or caller.session_with(tenant),
            cache_diagnostics=bool(caller.diagnostics),
        )

    def _prepared(
        self,
        body: Body,
        caller: Caller,
        terms: GenerationTerms,
        rendered: Rendered,
        ignored: Sequence[str],
        prefix_id: str = "",
    ) -> PreparedRequest:
        """Return what all kinds of requests have in common. Raises RequestError."""
        sender = self._sender(body, caller, prefix_id)
        requests = tuple(
            request
            for prompt in rendered.prompts
            for request in requests_of(terms, self._model, prompt, rendered.param, self._new_id, sender)
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
            ending=terms.ending,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=body.return_token_ids,
            special_tokens=not body.skip_special_tokens,
            ignored=(*body.ignored(UNSUPPORTED), *ignored),
        )
