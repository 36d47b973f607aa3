"""Builds engine requests from checked fields."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

from tidemill.cluster.edge.chat.output.detokenizer import Ending
from tidemill.cluster.edge.chat.request.params import BAD_WORDS_MAX, SEED_BITS, Params
from tidemill.cluster.edge.chat.text import MarkedPrompt
from tidemill.workers.messages import Grammar, Request, RequestError, Sampling


class ModelLimits(Protocol):
    """The facts of a model that requests depend on."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTerms:
    """The terms that all answers of a request share. `sampling.seed` is the request's; each of its `n`
    answers has its own."""

    sampling: Sampling
    ending: Ending
    stop_token_ids: tuple[int, ...]
    max_tokens: int | None  # None: as many as fit
    n: int
    clamps: bool = False  # more `max_tokens` than fit are as many as fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The fields of requests that no answer depends on: who sent them, and what is shared and kept."""

    tenant: str = ""
    salt: str = ""
    shares_prefixes: bool = True  # else each request has a salt of its own
    priority: int = 0
    ttft_s_max: float | None = None
    trace_parent: str = ""
    retain_s: float = 0.0
    session: str = ""
    cache_diagnostics: bool = False


NO_SENDER = Sender()


def sampling_of(
    params: Params,
    model: ModelLimits,
    encode: Callable[[str], list[int]],
    *,
    seed: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> Sampling:
    """Return how tokens are drawn, after a check of all ids in `params`; `seed` is used when the client gave
    none. `encode` is FolderTokenizer.encode_inside. Raises RequestError."""
    bad_words = bad_words_of(params.bad_words, encode)
    check_tokens([token for word in bad_words for token in word], "bad_words", model)
    check_tokens(params.stop_token_ids, "stop_token_ids", model)
    check_tokens(list(params.logit_bias), "logit_bias", model)
    if grammar is not None and (params.ignore_eos or not model.eos_token_ids):
        raise RequestError(
            "an answer that must match something ends with the model's end-of-sequence token: "
            "leave ignore_eos out",
            param="ignore_eos",
        )
    return Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed if params.seed is None else params.seed,
        seeded=params.seed is not None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_words=bad_words,
        min_tokens=params.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def terms_of(
    params: Params,
    model: ModelLimits,
    sampling: Sampling,
    *,
    max_tokens: int | None,
    n: int,
    ends: Sequence[int] = (),
    scores_stop: bool = False,
) -> GenerationTerms:
    """Return the terms; `ends` are more tokens that end an answer, after the model's and the client's."""
    stops = (*(() if params.ignore_eos else model.eos_token_ids), *params.stop_token_ids)
    return GenerationTerms(
        sampling=sampling,
        ending=Ending(
            stops=tuple(params.stop),
            stop_token_ids=tuple(params.stop_token_ids),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            scores_stop=scores_stop,
        ),
        stop_token_ids=(*stops, *(token for token in ends if token not in stops)),
        max_tokens=max_tokens,
        n=n,
        clamps=params.clamps_max_tokens,
    )


def bad_words_of(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words as vLLM has them: at the start of a text, and behind a space where
    that makes as many tokens and another first one. Raises RequestError."""
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        bare, spaced = tuple(encode(word.lstrip())), tuple(encode(f" {word.lstrip()}"))
        if not bare:
            raise RequestError(f"bad_words: {word!r} has no tokens: leave it out", param="bad_words")
        found.append(bare)
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found.append(spaced)
    if len(found) > BAD_WORDS_MAX:
        raise RequestError(
            f"bad_words are {len(found)} sequences of tokens: send fewer than {BAD_WORDS_MAX // 2} words",
            param="bad_words",
        )
    return tuple(found)


def requests_of(
    terms: GenerationTerms,
    model: ModelLimits,
    prompt: MarkedPrompt,
    param: str,
    new_id: Callable[[], str],
    sender: Sender = NO_SENDER,
) -> list[Request]:
    """Return the `n` requests for one prompt, which came in the field `param`. Raises RequestError."""
    tokens = tuple(prompt.tokens)
    allowance = _allowance(len(tokens), param, terms, model)
    check_tokens(tokens, param, model)
    if terms.sampling.min_tokens > allowance:
        raise RequestError(
            f"min_tokens {terms.sampling.min_tokens} is more than the {allowance} tokens that may come: "
            "lower it or raise max_tokens",
            param="min_tokens",
        )
    ids = [new_id() for _ in range(terms.n)]
    return [
        Request(
            request_id=request_id,
            tokens=tokens,
            max_new_tokens=allowance,
            sampling=replace(terms.sampling, seed=choice_seed(terms.sampling.seed, choice)),
            stop_token_ids=terms.stop_token_ids,
            salt=sender.salt if sender.shares_prefixes else f"{sender.salt}/{request_id}",
            priority=sender.priority,
            breakpoints=prompt.breakpoints,
            tenant=sender.tenant,
            ttft_s_max=sender.ttft_s_max,
            trace_parent=sender.trace_parent,
            retain_s=sender.retain_s,
            session=sender.session,
            cache_diagnostics=sender.cache_diagnostics,
        )
        for choice, request_id in enumerate(ids)
    ]


def check_tokens(tokens: Sequence[int], param: str, model: ModelLimits) -> None:
    """Check the token ids of a prompt. Raises RequestError."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < model.vocab_size):
        raise RequestError(
            f"{param} holds ids outside of the vocabulary: use 0 to {model.vocab_size - 1}", param=param
        )


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of the `n` answers, in [0, 2 ** 63): distinct, and the same at each
    repetition."""
    digest = blake2b(
        seed.to_bytes(8, "little", signed=True) + choice.to_bytes(4, "little"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def _allowance(num_tokens: int, param: str, terms: GenerationTerms, model: ModelLimits) -> int:
    """Return how many tokens may follow a prompt of `num_tokens`."""
    max_tokens = terms.max_tokens
    if num_tokens == 0:
        raise RequestError(f"{param} is empty: give at least one token", param=param)
    left = model.max_model_len - num_tokens
    if left > 0 and (max_tokens is None or terms.clamps):
        return min(left, max_tokens or left)
    if max_tokens is None or max_tokens > left:
        and_max_tokens = f" and max_tokens {max_tokens}" if max_tokens else ""
        fix = "set truncate_prompt_tokens" if max_tokens == 0 else "lower max_tokens"
        raise RequestError(
            f"this model's maximum context length is {model.max_model_len} tokens, but there are "
            f"{num_tokens} prompt tokens{and_max_tokens}: shorten the prompt or {fix}",
            param=param,
            code="context_length_exceeded",
        )
    return max_tokens
