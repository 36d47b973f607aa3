from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Finish]
    STOP: _ClassVar[Finish]
    LENGTH: _ClassVar[Finish]
NONE: Finish
STOP: Finish
LENGTH: Finish

class ClientFrame(_message.Message):
    __slots__ = ("hello", "generate", "produce", "cancel", "prefetch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    PRODUCE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    generate: Call
    produce: Call
    cancel: Cancel
    prefetch: Call
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., generate: _Optional[_Union[Call, _Mapping]] = ..., produce: _Optional[_Union[Call, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., prefetch: _Optional[_Union[Call, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("call", "request")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    call: int
    request: Request
    def __init__(self, call: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: int
    def __init__(self, call: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "tokens", "max_new_tokens", "sampling", "stop_token_ids", "salt", "gap_tokens_max", "drawn", "priority", "tenant", "ttft_s_max", "lag_s", "on_trial")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    GAP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_MAX_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    ON_TRIAL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    gap_tokens_max: int
    drawn: int
    priority: int
    tenant: str
    ttft_s_max: float
    lag_s: float
    on_trial: bool
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ..., gap_tokens_max: _Optional[int] = ..., drawn: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., ttft_s_max: _Optional[float] = ..., lag_s: _Optional[float] = ..., on_trial: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenValue]
    min_tokens: int
    logprobs: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenValue, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class TokenValue(_message.Message):
    __slots__ = ("token", "value")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    token: int
    value: float
    def __init__(self, token: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("call", "delta", "produced", "failure", "alone")
    CALL_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    call: int
    delta: Delta
    produced: Produced
    failure: Failure
    alone: bool
    def __init__(self, call: _Optional[int] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., produced: _Optional[_Union[Produced, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., alone: bool = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("tokens", "logprobs", "finish", "provenance")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish: Finish
    provenance: Provenance
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[Finish, str]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenValue]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenValue, _Mapping]]] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("reused_tokens", "fetched_tokens", "computed_tokens")
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reused_tokens: int
    fetched_tokens: int
    computed_tokens: int
    def __init__(self, reused_tokens: _Optional[int] = ..., fetched_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ...) -> None: ...

class Produced(_message.Message):
    __slots__ = ("depth", "provenance")
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    depth: int
    provenance: Provenance
    def __init__(self, depth: _Optional[int] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message", "param", "status", "code")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Failure.Kind]
        PAGES_MISSING: _ClassVar[Failure.Kind]
        WORKER_GONE: _ClassVar[Failure.Kind]
        BAD_REQUEST: _ClassVar[Failure.Kind]
        HANDED_OVER: _ClassVar[Failure.Kind]
    UNKNOWN: Failure.Kind
    PAGES_MISSING: Failure.Kind
    WORKER_GONE: Failure.Kind
    BAD_REQUEST: Failure.Kind
    HANDED_OVER: Failure.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    kind: Failure.Kind
    message: str
    param: str
    status: int
    code: str
    def __init__(self, kind: _Optional[_Union[Failure.Kind, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., status: _Optional[int] = ..., code: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("request_id", "keys", "num_tokens", "max_new_tokens", "avoid", "wait_s_max", "tenant", "ttft_s_max", "content")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_MAX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_MAX_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    keys: bytes
    num_tokens: int
    max_new_tokens: int
    avoid: _containers.RepeatedScalarFieldContainer[str]
    wait_s_max: float
    tenant: str
    ttft_s_max: float
    content: bytes
    def __init__(self, request_id: _Optional[str] = ..., keys: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., avoid: _Optional[_Iterable[str]] = ..., wait_s_max: _Optional[float] = ..., tenant: _Optional[str] = ..., ttft_s_max: _Optional[float] = ..., content: _Optional[bytes] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("route", "overload", "poisonous")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    OVERLOAD_FIELD_NUMBER: _ClassVar[int]
    POISONOUS_FIELD_NUMBER: _ClassVar[int]
    route: Route
    overload: Overload
    poisonous: str
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., overload: _Optional[_Union[Overload, _Mapping]] = ..., poisonous: _Optional[str] = ...) -> None: ...

class Overload(_message.Message):
    __slots__ = ("message", "predicted_s", "retry_after_s")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    message: str
    predicted_s: float
    retry_after_s: float
    def __init__(self, message: _Optional[str] = ..., predicted_s: _Optional[float] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("decode", "decode_address", "prefill", "prefill_address", "gap_tokens_max", "predicted_s", "lag_s")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GAP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    decode: str
    decode_address: str
    prefill: str
    prefill_address: str
    gap_tokens_max: int
    predicted_s: float
    lag_s: float
    def __init__(self, decode: _Optional[str] = ..., decode_address: _Optional[str] = ..., prefill: _Optional[str] = ..., prefill_address: _Optional[str] = ..., gap_tokens_max: _Optional[int] = ..., predicted_s: _Optional[float] = ..., lag_s: _Optional[float] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("worker", "content")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    content: bytes
    def __init__(self, worker: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Lives(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[str]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("want_full", "budget_bytes", "drain", "role")
    WANT_FULL_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    want_full: bool
    budget_bytes: int
    drain: bool
    role: str
    def __init__(self, want_full: bool = ..., budget_bytes: _Optional[int] = ..., drain: bool = ..., role: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("name", "drain", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    drain: bool
    force: bool
    def __init__(self, name: _Optional[str] = ..., drain: bool = ..., force: bool = ...) -> None: ...

class RoleChange(_message.Message):
    __slots__ = ("name", "role")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("name", "budget_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    budget_bytes: int
    def __init__(self, name: _Optional[str] = ..., budget_bytes: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("info", "sequence", "load", "announcement", "draining")
    INFO_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    sequence: int
    load: WorkerLoad
    announcement: Announcement
    draining: bool
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., sequence: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., announcement: _Optional[_Union[Announcement, _Mapping]] = ..., draining: bool = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker", "name", "role", "address", "pid", "node", "rank", "fingerprint", "layout", "page_tokens", "page_bytes", "state_bytes", "step_tokens_max", "max_model_len", "vocab_size", "eos_token_ids", "device", "memory_bytes", "memory_floor_bytes", "memory_max_bytes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    name: str
    role: str
    address: str
    pid: int
    node: str
    rank: int
    fingerprint: str
    layout: str
    page_tokens: int
    page_bytes: int
    state_bytes: int
    step_tokens_max: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    device: str
    memory_bytes: int
    memory_floor_bytes: int
    memory_max_bytes: int
    def __init__(self, worker: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., rank: _Optional[int] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[str] = ..., page_tokens: _Optional[int] = ..., page_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., step_tokens_max: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., memory_floor_bytes: _Optional[int] = ..., memory_max_bytes: _Optional[int] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ("pages_live", "pages_cached", "states_live", "states_cached", "free", "empty", "unmapped")
    PAGES_LIVE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    STATES_LIVE_FIELD_NUMBER: _ClassVar[int]
    STATES_CACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    pages_live: int
    pages_cached: int
    states_live: int
    states_cached: int
    free: int
    empty: int
    unmapped: int
    def __init__(self, pages_live: _Optional[int] = ..., pages_cached: _Optional[int] = ..., states_live: _Optional[int] = ..., states_cached: _Optional[int] = ..., free: _Optional[int] = ..., empty: _Optional[int] = ..., unmapped: _Optional[int] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("step_s", "token_s", "pair_s", "row_s", "fetch_bytes_per_s")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    token_s: float
    pair_s: float
    row_s: float
    fetch_bytes_per_s: float
    def __init__(self, step_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ..., row_s: _Optional[float] = ..., fetch_bytes_per_s: _Optional[float] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("queued_tokens", "queued_s", "running_rows", "waiting_rows", "memory", "budget_bytes", "wanted_bytes", "state_slots", "speed", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ROWS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    queued_tokens: int
    queued_s: float
    running_rows: int
    waiting_rows: int
    memory: MemoryUse
    budget_bytes: int
    wanted_bytes: int
    state_slots: int
    speed: Speed
    counters: _containers.ScalarMap[str, float]
    def __init__(self, queued_tokens: _Optional[int] = ..., queued_s: _Optional[float] = ..., running_rows: _Optional[int] = ..., waiting_rows: _Optional[int] = ..., memory: _Optional[_Union[MemoryUse, _Mapping]] = ..., budget_bytes: _Optional[int] = ..., wanted_bytes: _Optional[int] = ..., state_slots: _Optional[int] = ..., speed: _Optional[_Union[Speed, _Mapping]] = ..., counters: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("added", "removed", "full")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    added: bytes
    removed: bytes
    full: bool
    def __init__(self, added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., full: bool = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("info", "load", "state", "heard_ago_s", "restorable_depths", "set_by", "set_bytes")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARD_AGO_S_FIELD_NUMBER: _ClassVar[int]
    RESTORABLE_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    SET_BYTES_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    load: WorkerLoad
    state: str
    heard_ago_s: float
    restorable_depths: int
    set_by: str
    set_bytes: int
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., state: _Optional[str] = ..., heard_ago_s: _Optional[float] = ..., restorable_depths: _Optional[int] = ..., set_by: _Optional[str] = ..., set_bytes: _Optional[int] = ...) -> None: ...

class FleetStatus(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...
