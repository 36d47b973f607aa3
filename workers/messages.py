"""Everything that crosses a process boundary between frontend, router and workers, and nothing else."""

from dataclasses import dataclass, field
from typing import Literal, NewType

import msgspec

from tidemill.kvstore.errors import TidemillError

WorkerId = NewType("WorkerId", str)
"""One life of one worker: `decode-0.3f9a1c`. A restarted worker has another id."""

Role = Literal["prefill", "decode", "mixed"]
FinishReason = Literal["stop", "length"]

TRIAL_TOKENS = 3
"""A request on trial runs alone until it has drawn so many: those of the steps that can have been in flight
when its worker died, and of one whose tokens were still on their way."""

ANNOUNCED_KEY_BYTES = 8
"""Announced keys are cut to this length: a collision costs a wrong guess of the router, never a wrong
token."""


GRAMMAR_BYTES_MAX = 64 << 10
"""Compiling an ordinary schema takes a millisecond or two, the worst of this size that we found 0.13 s."""

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must match. `text` is a JSON schema, a regular expression, a grammar in the Lark form of
    llguidance, or a JSON list of texts to choose from; empty for json_object."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. A draw is a function of the logits, the tokens before it, the seed and the
    token's position.

    temperature 0 is greedy. top_k 0, top_p 1.0 and min_p 0.0 switch the filters off. The presence and the
    frequency penalty count the tokens of the answer, the repetition penalty those of the prompt as well.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    min_tokens: int = 0  # of the answer, before any of the stop tokens can be drawn
    logprobs: int | None = None  # alternatives reported with each token, 0 for the token alone; None: nothing
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, the first one aside
    grammar: Grammar | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of a token's probability, and the likeliest tokens at its place with theirs.

    Of the model's own distribution: before temperature, penalties, bias, filters and grammar.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue. After a loss it is sent again with the tokens already streamed in `tokens`.

    A token of `stop_token_ids` ends the sequence with "stop" (it is reported and counts as a token); they
    hold the model's end-of-sequence ids unless the client ignores them. `max_new_tokens` counts from the end
    of `tokens`. A decode worker computes at most `gap_tokens_max` prompt tokens below the last page boundary
    that nobody holds, beyond that it answers PagesMissing; None is no limit. The last `drawn` of `tokens`
    are not the prompt's: they were drawn and streamed before a loss. Lower values of `priority` go first.
    If it asks for logprobs of the prompt, `scored` of them came before a loss: those after them are wanted.

    `tenant` is who asks, `ttft_s_max` how long they want to wait for the first token (None: as long as the
    server lets them, inf: for ever, for it was taken before); both are for the router. A worker takes it in
    order of its arrival plus `queue_offset_s`: negative, it goes before those of tenants that have had more.
    `on_trial`: it was in a step of a worker that died, and runs alone until it has drawn TRIAL_TOKENS.
    `trace_parent` is the W3C traceparent of whoever sends it; empty: it is not traced.
    """

    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()
    salt: str = ""
    gap_tokens_max: int | None = None
    drawn: int = 0
    scored: int = 0
    priority: int = 0
    tenant: str = ""
    ttft_s_max: float | None = None
    queue_offset_s: float = 0.0
    on_trial: bool = False
    trace_parent: str = ""

    @property
    def to_score(self) -> int:
        """How many of the prompt's tokens shall come with a logprob: all but the first one, or none."""
        return 0 if self.sampling.prompt_logprobs is None else len(self.tokens) - self.drawn - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a prompt took on one worker, in seconds, in this order, until its first token was drawn or
    all that was asked for was stored."""

    waited_s: float = 0.0  # for its turn, for memory, for others that computed its prefix
    fetched_s: float = 0.0  # while pages came from the store
    computed_s: float = 0.0
    stored_s: float = 0.0  # on a prefill worker: after the last step, until the store had everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the tokens of a prompt came from on one worker; the three add up to the tokens it now holds."""

    reused_tokens: int = 0  # were already in its memory
    fetched_tokens: int = 0  # came from the store
    computed_tokens: int = 0
    times: Times = field(default_factory=Times, compare=False)


class Produced(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A prefill worker's answer: the store holds every page below `depth` and the checkpoint at it."""

    depth: int
    provenance: Provenance


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """What one step adds to one stream. The first one says where the prompt came from.

    `logprobs` has an item for each token if the request asked for them, else none. `prompt_logprobs` are of
    the prompt's next tokens, from its second one on: all have come before the answer's first token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    provenance: Provenance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a worker's arena by what they hold. They add up to its budget, or to more while it shrinks.

    live is held by requests that run; cached by the prefix index alone, and can be taken back.
    """

    pages_live: int = 0
    pages_cached: int = 0
    states_live: int = 0
    states_cached: int = 0
    windows_live: int = 0  # pages of layers that see a window
    windows_cached: int = 0
    free: int = 0  # places that nobody holds in extents that hold something
    empty: int = 0  # extents that hold nothing, mapped
    unmapped: int = 0  # of the budget, not taken from the system

    @property
    def live(self) -> int:
        return self.pages_live + self.states_live + self.windows_live

    @property
    def cached(self) -> int:
        return self.pages_cached + self.states_cached + self.windows_cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a worker is, as it measures itself: seconds, and bytes per second. 0: not measured yet."""

    step_s: float = 0.0  # of a step, whatever is in it
    token_s: float = 0.0  # of a prompt token
    pair_s: float = 0.0  # of a prompt token, for each token before it
    row_s: float = 0.0  # of a row that decodes
    fetch_bytes_per_s: float = 0.0  # from the store

    def prefill_s(self, start: int, end: int, step_tokens: int) -> float:
        """Of the prompt tokens `[start, end)`, in steps of so many and nothing beside them."""
        num_tokens = max(0, end - start)
        steps = -(-num_tokens // step_tokens)
        pairs = num_tokens * (start + end) / 2
        return steps * self.step_s + num_tokens * self.token_s + pairs * self.pair_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker has to do and to hold, for placement, for the broker and for people."""

    queued_tokens: int = 0  # prompt tokens not yet computed, of waiting and running rows
    queued_s: float = 0.0  # how long these will take, by `speed`
    running_rows: int = 0
    waiting_rows: int = 0
    memory: MemoryUse = field(default_factory=MemoryUse)
    budget_bytes: int = 0  # what it may take from the system
    wanted_bytes: int = 0  # what its waiting requests will need
    state_slots: int = 0  # states that running rows hold: their own, and the checkpoint each keeps for itself
    speed: Speed = field(default_factory=Speed)
    counters: dict[str, float] = field(default_factory=dict[str, float])  # totals since the start, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Restorable depths that came and went since the last one, as cut keys; `full` replaces all before it."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The fixed facts of an engine. All bytes are totals over its ranks."""

    tensor_parallel_size: int = 1  # ranks
    fingerprint: str = ""  # of the model's weights and configuration
    layout: str = ""  # Shards.describe(); with the fingerprint and a salt it is the namespace of its keys
    page_tokens: int = 64
    page_bytes: int = 0
    state_bytes: int = 0  # of a checkpoint, its state and window; 0: the model needs no checkpoints
    step_tokens_max: int = 8192  # the most tokens that one step computes
    max_model_len: int = 0  # the most prompt and answer tokens that the model allows and the memory holds
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    device: str = ""  # workers on the same device can hand memory to each other
    memory_bytes: int = 0  # the configured memory; the budget of a device is the sum over its workers
    memory_floor_bytes: int = 0  # the least budget: it holds one request of max_model_len
    memory_max_bytes: int = 0  # the largest budget: the reserved address space


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo(EngineInfo):
    """The identity of a worker incarnation and the facts of its engine. Only its role may change."""

    worker: WorkerId
    name: str  # `decode-0`, the same after a restart
    role: Role
    address: str  # host:port of its gRPC server
    pid: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A worker's report to the router, about once a second, sent from its step loop."""

    info: WorkerInfo
    sequence: int  # counts up by one; a hole makes the router ask for a full announcement
    load: WorkerLoad
    announcement: Announcement
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The router's answer to a heartbeat."""

    want_full: bool = False  # the next announcement shall replace all before it
    budget_bytes: int | None = None  # of the worker's memory from now on; None leaves it as it is
    drain: bool = False  # take no more work, and hand over what is there
    role: Role | None = None  # to be from now on; None leaves it as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The way one request took on its last attempt; sums up for usage, the demo and the metrics."""

    attempts: int
    hand_overs: int = 0  # planned changes of the worker, which are no attempts
    placed_s: float = field(default=0.0, compare=False)  # how long routers took
    decode: WorkerId
    provenance: Provenance  # of the decode worker
    prefill: WorkerId | None = None
    produced: Produced | None = None  # by the prefill worker

    @property
    def prefilled(self) -> Provenance:
        """Where the prompt's tokens came from on the prefill worker; nothing without one."""
        return self.produced.provenance if self.produced else Provenance()

    def cached_tokens(self, prompt_tokens: int) -> int:
        """Tokens of a prompt of this length that no worker computed for this request."""
        return max(0, prompt_tokens - self.prefilled.computed_tokens - self.provenance.computed_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What the flow hands to the edge: new tokens of a stream, in order, each exactly once; before them, and
    in the same way, the logprobs of the prompt."""

    tokens: tuple[int, ...]
    trace: Trace
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


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
    """Every attempt failed."""


class Overloaded(Unserved):
    """Refused before anything was begun: the first token would come after `predicted_s`, later than it is
    worth. Ask again in `retry_after_s`."""

    def __init__(self, message: str, *, predicted_s: float, retry_after_s: float) -> None:
        super().__init__(message)
        self.predicted_s = predicted_s
        self.retry_after_s = retry_after_s


class Poisonous(TidemillError):
    """The request has ended workers, so it is not tried again."""


class PagesMissing(TidemillError):
    """A longer gap than the worker may compute: produce the prompt again."""


class WorkerGone(TidemillError):
    """The worker died, or does not take work any more."""


class HandedOver(WorkerGone):
    """The worker was told not to do this work: nobody has failed, and what it had of it is stored."""


class CrashedAlone(WorkerGone):
    """The worker was lost while it ran nothing but this request, which was on trial."""


class LostAlone(WorkerGone):
    """The worker fell silent while it ran nothing but this request, which was on trial. Whether its process
    exited is unknown, for example on a machine that stands still."""
