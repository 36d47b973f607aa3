"""The messages that cross a process boundary between edge, router and workers."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal, NewType, get_args

import msgspec

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.layout import CLASSES
from tidemill.workers.cache_lookup import CacheLookup, CacheMiss

WorkerId = NewType("WorkerId", str)
"""The id of one incarnation of a worker: `decode-0.3f9a1c`. A restarted worker has another id."""

COUNT_MAX = 1 << 53
"""The largest number in a message: up to it a float64 has every one."""

# Decoders check these ranges, wherever bytes are received. A client's numbers are checked by the same decoder
# before they are sent.
Integer = Annotated[int, msgspec.Meta(ge=-COUNT_MAX, le=COUNT_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Word = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1)]
Number = Annotated[float, msgspec.Meta(le=sys.float_info.max)]
"""A float, or -inf as of what has no probability. It is not NaN."""

Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

Role = Literal["prefill", "decode", "mixed"]
FinishReason = Literal["stop", "length"]
PoolingKind = Literal["embed", "classify"]

Feature = Literal[
    "bad_words", "grammar", "grammar_alternatives", "penalties", "pooling", "prompt_logprobs", "seed"
]
"""The parts of a request that an engine of others may not have, or not be able to continue:
grammar_alternatives are the `otherwise` of a grammar; penalties are those that count the answer's tokens."""

TRIAL_TOKENS = 3
"""The number of tokens that a request on trial draws alone: those of the steps that can have been in flight
when its worker crashed, and of one whose tokens were still on their way."""

ANNOUNCED_KEY_BYTES = 8
"""The length of announced keys. A collision costs a wrong guess of the router, never a wrong token."""


GRAMMAR_BYTES_MAX = 64 << 10
"""The size limit of a grammar. An ordinary schema compiles in 1 or 2 ms, the worst of this size that we found
in 0.13 s."""

BREAKPOINTS_MAX = 4
"""The maximum number of breakpoints of a prompt, as in Anthropic's API."""

RETAIN_S_MAX = 3600.0
"""The longest time after its last use for which a prompt is retained, as in Anthropic's API."""

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The grammar that an answer must match. `text` is a JSON schema, a regular expression, a grammar in the
    Lark form of llguidance, or a JSON list of texts to choose from; empty for json_object.

    frame      a Lark grammar of the whole answer, in which @answer stands for it; empty: it is all
    otherwise  a grammar that the answer may match instead
    stand_in   the grammar in the place of this one, if this is an `otherwise` that cannot be followed
    """

    kind: GrammarKind
    text: str = ""
    frame: str = ""
    otherwise: "Grammar | None" = None
    stand_in: "Grammar | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The parameters of a draw. A draw is a function of the logits, the tokens before it, the seed and the
    token's position.

    temperature 0 is greedy. top_k 0, top_p 1.0 and min_p 0.0 switch the filters off. The presence and the
    frequency penalty count the tokens of the answer, the repetition penalty those of the prompt as well.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)] = 1.0
    top_k: Count = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    seeded: bool = False  # the client has chosen the seed
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)] = 1.0
    logit_bias: tuple[tuple[TokenId, Number], ...] = ()  # (token id, added to its logit)
    bad_words: tuple[Word, ...] = ()  # sequences of tokens that the answer never has
    min_tokens: Count = 0  # tokens of the answer before any stop token can be drawn
    logprobs: Count | None = None  # alternatives with each token, 0: only the token; None: no logprobs
    prompt_logprobs: Count | None = None  # the same for the prompt's tokens after the first
    grammar: Grammar | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural logarithm of a token's probability, and the most likely tokens at its position with
    theirs.

    They are of the model's own distribution: before temperature, penalties, bias, filters and grammar.
    """

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue. After a loss it is sent again with the tokens already streamed in `tokens`.

    A token of `stop_token_ids` ends the sequence with "stop" (it is reported and counts as a token). They
    contain the model's end-of-sequence ids unless the client ignores them. `max_new_tokens` counts from the
    end of `tokens`. A decode worker computes at most `gap_tokens_max` prompt tokens below the last page
    boundary that are neither here nor in the store, and beyond that raises PagesMissing; None is no limit.
    The last `drawn` of `tokens` were drawn and streamed before a loss. Lower values of `priority` go first.
    If it asks for logprobs of the prompt, `scored` of them were sent before a loss, and those after them are
    wanted.

    `tenant` is who pays, `ttft_s_max` the longest time to the first token (None: the server's limit, inf: no
    limit, because it was admitted before); both are for the router. A worker takes requests in order of
    arrival plus `queue_offset_s`: a negative one goes before those of tenants that used more. `on_trial`: the
    request was in a step of a worker that crashed, and runs alone until it has drawn TRIAL_TOKENS.
    `trace_parent` is the W3C traceparent of the sender; empty: no tracing.
    `handoff` is what a prefill worker gave with its answer (`Produced`), for the decode worker.
    `breakpoints` are depths, ascending, where later requests are likely to leave the prompt.
    For `retain_s` after its last use, 0 for not at all, the tenant pays for keeping what the prompt left in
    memory. `session` replaces what earlier requests of that name retained; it is a digest with the tenant.
    `cache_diagnostics`: the client asks why the prompt was not cached. None of the four changes a token.

    With `pools` nothing is drawn: the answer is what the model pools at the last token (`Pooling`), and
    `max_new_tokens` is 0.
    """

    request_id: str
    tokens: tuple[TokenId, ...]
    max_new_tokens: Count
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[TokenId, ...] = ()
    salt: str = ""
    gap_tokens_max: Count | None = None
    drawn: Count = 0
    scored: Count = 0
    priority: Integer = 0
    tenant: str = ""
    ttft_s_max: Seconds | None = None
    queue_offset_s: Finite = 0.0
    on_trial: bool = False
    trace_parent: str = ""
    breakpoints: tuple[Count, ...] = ()
    retain_s: Seconds = 0.0
    session: str = ""
    cache_diagnostics: bool = False
    pools: bool = False
    handoff: bytes | None = None

    @property
    def to_score(self) -> int:
        """The number of prompt tokens with a logprob: all but the first one, or none."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.tokens) - self.drawn - 1


def features_of(request: Request) -> set[Feature]:
    """Return the features that a request has. A seed matters where draws are random."""
    sampling = request.sampling
    found: dict[Feature, object] = {
        "bad_words": sampling.bad_words,
        "grammar": sampling.grammar is not None,
        "grammar_alternatives": sampling.grammar is not None and sampling.grammar.otherwise is not None,
        "penalties": sampling.presence_penalty or sampling.frequency_penalty,
        "pooling": request.pools,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "seed": sampling.seeded and sampling.temperature,
    }
    return {feature for feature, has in found.items() if has}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of a prompt on one worker, in seconds, in this order, until its first token was drawn or all
    pages that were requested were stored."""

    waited_s: float = 0.0  # in the admission queue, for memory, for requests that computed its prefix
    fetched_s: float = 0.0  # while pages were fetched from the store
    computed_s: float = 0.0
    stored_s: float = 0.0  # on a prefill worker: after the last step, until the store had everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The source of a prompt's tokens on one worker; the three add up to the tokens it now holds. `lookup` is
    None where it could restore all of the prompt, and of a worker of an earlier version."""

    reused_tokens: Count = 0  # were already in its memory
    fetched_tokens: Count = 0  # came from the store
    computed_tokens: Count = 0
    times: Times = field(default_factory=Times, compare=False)
    lookup: CacheLookup | None = field(default=None, compare=False)


class Produced(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The answer of a prefill worker: the store holds every page below `depth` and the checkpoint at it. An
    engine without our store keeps them until the decode worker takes them, by its `handoff`."""

    depth: Count
    provenance: Provenance
    handoff: bytes | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The addition of one step to one stream. The first one has the source of the prompt.

    `logprobs` has an item for each token if the request asked for them, else none. `prompt_logprobs` are of
    the prompt's next tokens, from its second one on: all have come before the answer's first token.
    `pooled` is the answer of a request that pools, float32 in little-endian order.
    """

    tokens: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    provenance: Provenance | None = None
    pooled: bytes = b""


NO_MEMORY = {f"{name}_{use}": 0 for name in CLASSES for use in ("live", "cached")} | {
    "free": 0,
    "empty": 0,
    "unmapped": 0,
}
"""The bytes of a worker's arena by use, which add up to its budget, or to more while it shrinks.

Of each class of objects, live ones are held by running requests. Cached ones are held only by the prefix
index and can be reclaimed. Free bytes are in extents that hold something, empty ones in mapped extents that
hold nothing, and unmapped ones are a part of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The measured speed of a worker: seconds, and bytes per second. 0: not measured yet."""

    step_s: float = 0.0  # of a step, whatever it runs
    token_s: float = 0.0  # of a prompt token
    pair_s: float = 0.0  # of a prompt token, for each token before it
    row_s: float = 0.0  # of a row that decodes
    fetch_bytes_per_s: float = 0.0  # from the store

    def prefill_s(self, start: int, end: int, step_tokens: int) -> float:
        """Return the time of the prompt tokens `[start, end)`, in steps of `step_tokens` without streams."""
        num_tokens = max(0, end - start)
        steps = -(-num_tokens // step_tokens)
        pairs = num_tokens * (start + end) / 2
        return steps * self.step_s + num_tokens * self.token_s + pairs * self.pair_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The work and the memory of a worker, for placement, for the memory broker and for operators."""

    queued_tokens: Integer = 0  # prompt tokens not yet computed, of waiting and running rows
    queued_s: float = 0.0  # the time that these will take, by `speed`
    running_rows: Integer = 0
    waiting_rows: Integer = 0
    streams: Integer = 0  # running rows that decode, which prompts run beside
    memory: dict[str, Integer] = field(default_factory=NO_MEMORY.copy)  # bytes by use
    budget_bytes: Integer = 0  # the memory that it may use
    wanted_bytes: Integer = 0  # what its waiting requests will need beyond the pages that are here
    state_slots: Integer = 0  # states of running rows, each with the checkpoint that it keeps for itself
    speed: Speed = field(default_factory=Speed)
    counters: dict[str, float] = field(default_factory=dict[str, float])  # totals since the start, by name

    @property
    def live_bytes(self) -> int:
        return sum(size for use, size in self.memory.items() if use.endswith("_live"))

    @property
    def cached_bytes(self) -> int:
        return sum(size for use, size in self.memory.items() if use.endswith("_cached"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The restorable depths added and removed since the last announcement, as cut keys. `full` replaces all
    earlier ones."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The kind of what a model returns for a prompt instead of an answer, from the hidden state at its end.

    embed       that state after the final norm, before any normalisation: `size` numbers
    classify    the logits of `size` labels; of two, the first is "no" and the second "yes"
    """

    kind: PoolingKind
    size: Positive
    normalize: bool = True  # whether embeddings get the length 1
    dimensions: tuple[Positive, ...] | None = None  # shorter lengths that it allows: (): any, None: none


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The fixed facts of an engine. All bytes are totals over its ranks."""

    exact: bool = True  # a request sent again with the tokens already drawn continues with the same tokens
    isolates: bool = True  # a request on trial runs alone, and its caller is notified
    publishes: bool = True  # the store has what it announces, so that other workers can fetch it
    inexact_with: tuple[str, ...] = ()  # but not one with any of these
    refuses: tuple[str, ...] = ()  # it serves no request with any of these; see Feature
    roles: tuple[Role, ...] = get_args(Role)  # the work that it can do

    tensor_parallel_size: Count = 1  # ranks
    fingerprint: str = ""  # of the model's weights and configuration
    layout: str = ""  # Shards.describe(); with the fingerprint and a salt it is the namespace of its keys
    page_tokens: Positive = 64
    page_bytes: Count = 0
    state_bytes: Count = 0  # of a checkpoint, its state and window; 0: the model needs no checkpoints
    step_tokens_max: Positive = 8192  # the most tokens that one step computes
    itl_target_s: float = 0.0  # of a step with prompts beside streams; 0: no limit
    max_model_len: Count = 0  # the most prompt and answer tokens that the model allows and the memory holds
    vocab_size: Count = 0
    eos_token_ids: tuple[TokenId, ...] = ()
    pooling: Pooling | None = None  # None: it generates, and pools nothing
    device: str = ""  # workers on the same device can hand memory to each other
    memory_bytes: Count = 0  # the configured memory; the budget of a device is the sum over its workers
    memory_floor_bytes: Count = 0  # the least budget: it holds one request of max_model_len
    memory_max_bytes: Count = 0  # the largest budget: the reserved address space


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo(EngineInfo):
    """The identity of a worker incarnation and the facts of its engine. Only its role may change."""

    worker: WorkerId
    name: str  # `decode-0`, the same after a restart
    role: Role
    address: str  # host:port of its gRPC server
    pid: Count
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A worker's report to the router, about once a second, sent from its step loop."""

    info: WorkerInfo
    sequence: Count  # increases by one; after a gap the router requests a full announcement
    load: WorkerLoad
    announcement: Announcement
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The router's answer to a heartbeat."""

    want_full: bool = False  # the next announcement must replace all earlier ones
    budget_bytes: Count | None = None  # of the worker's memory from now on; None: unchanged
    drain: bool = False  # take no more work, and hand over the running work
    role: Role | None = None  # from now on; None: unchanged
    revoked: frozenset[str] = frozenset()  # serials of certificates that the worker must refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The path of one request on its last attempt, for usage, the demo and the metrics."""

    attempts: int
    hand_overs: int = 0  # planned changes of the worker, which do not count as attempts
    placed_s: float = field(default=0.0, compare=False)  # the time in routers
    decode: WorkerId
    provenance: Provenance  # of the decode worker
    prefill: WorkerId | None = None
    produced: Produced | None = None  # by the prefill worker
    misses: tuple[CacheMiss, ...] = field(default=(), compare=False)

    @property
    def prefilled(self) -> Provenance:
        """The source of the prompt's tokens on the prefill worker; all 0 without one."""
        return self.produced.provenance if self.produced else Provenance()

    def cached_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt of this length no worker computed for this request."""
        return max(0, prompt_tokens - self.prefilled.computed_tokens - self.provenance.computed_tokens)


class StreamPiece(msgspec.Struct, frozen=True):
    """An item from the flow to the edge: new tokens of a stream, in order, each exactly once; before them, in
    the same way, the logprobs of the prompt."""

    tokens: tuple[int, ...]
    trace: Trace
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    pooled: bytes = b""


class RequestError(TidemillError):
    """A request that cannot be served as it is. `param` names the field, `status` is the HTTP status."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class Unserved(TidemillError):
    """All attempts failed."""


class Overloaded(Unserved):
    """The request was refused before any work: the first token would come after `predicted_s`, too late.
    Retry in `retry_after_s`."""

    def __init__(self, message: str, *, predicted_s: float, retry_after_s: float) -> None:
        super().__init__(message)
        self.predicted_s = predicted_s
        self.retry_after_s = retry_after_s


class Poisonous(TidemillError):
    """The request has crashed workers, so it is not tried again."""


class PagesMissing(TidemillError):
    """The gap is longer than the worker may compute: produce the prompt again."""


class WorkerGone(TidemillError):
    """The worker is gone, or takes no more work."""


class HandedOver(WorkerGone):
    """The worker was ordered to leave this work to others. Nothing failed, and its part of the work is
    stored."""


class CrashedAlone(WorkerGone):
    """The worker crashed while it ran nothing but this request, which was on trial."""


class LostAlone(WorkerGone):
    """The worker fell silent while it ran nothing but this request, which was on trial. Whether its process
    exited is unknown, for example on a machine that stands still."""


BLANKS = r"(\n[ \t]{0,40}|[ ])?"
"""The white space between two tokens of JSON: none, a space, or a new line with its indentation. Without a
bound a model can continue with blanks until its answer is cut off."""
