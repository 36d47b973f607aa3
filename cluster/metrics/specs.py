"""The metrics of the edge as data: names, units, labels, buckets. Those of workers are in
worker_metrics.py.

Base names, units and meanings are those of vLLM, where vLLM has the metric.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "tidemill:"
MODEL = "model_name"

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
ITL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
E2E_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)
PART_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)
TOKEN_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
DEPTH_BUCKETS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
ATTEMPT_BUCKETS = (1, 2, 3, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spec:
    """One metric. `name` has no prefix, and that of a counter no `_total` suffix."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    unit: str = ""
    labels: tuple[str, ...] = (MODEL,)
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    def family(self, values: Iterable[tuple[Sequence[str], float]]) -> Metric:
        """Return the samples of a counter or a gauge, by the values of its labels."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        made = kind(self.full_name, self.text, labels=self.labels)
        for labels, value in values:
            made.add_metric(labels, value)
        return made


@dataclass(slots=True, eq=False)
class Collected:
    """A collector of prometheus_client."""

    collect: Callable[[], Iterable[Metric]]


def _seconds(name: str, text: str, buckets: tuple[float, ...] = PART_BUCKETS_S) -> Spec:
    return Spec(name=name, kind="histogram", text=text, unit="seconds", buckets=buckets)


def _tokens(name: str, text: str, buckets: tuple[float, ...] = TOKEN_BUCKETS) -> Spec:
    return Spec(name=name, kind="histogram", text=text, unit="tokens", buckets=buckets)


def _counter(name: str, text: str, unit: str = "", labels: tuple[str, ...] = (MODEL,)) -> Spec:
    return Spec(name=name, kind="counter", text=text, unit=unit, labels=labels)


TTFT = _seconds("time_to_first_token_seconds", "Time from the request to its first token.", TTFT_BUCKETS_S)
ITL = _seconds("inter_token_latency_seconds", "Time between the tokens of an answer.", ITL_BUCKETS_S)
TPOT = _seconds(
    "request_time_per_output_token_seconds",
    "Time from the first token of an answer to its last, per token after the first.",
    ITL_BUCKETS_S,
)
E2E = _seconds("e2e_request_latency_seconds", "Time from the request to its last token.", E2E_BUCKETS_S)
QUEUE = _seconds(
    "request_queue_time_seconds",
    "Time in queues before the first token: at the router, and at workers.",
)
PREFILL = _seconds(
    "request_prefill_time_seconds", "Time before the first token outside queues: computing and fetching."
)
DECODE = _seconds("request_decode_time_seconds", "Time from the first token to the last.")
INFERENCE = _seconds(
    "request_inference_time_seconds", "Time from the request to its last token, without the time in queues."
)
PROMPT_LENGTH = _tokens("request_prompt_tokens", "Prompt tokens of an answer that started.")
ANSWER_LENGTH = _tokens("request_generation_tokens", "Tokens of an answer that finished.")
HIT_DEPTH = _tokens(
    "request_restorable_hit_depth_tokens",
    "Depth at which the first worker resumed the prompt, from its memory or the store.",
    DEPTH_BUCKETS,
)
ATTEMPTS = Spec(
    name="request_attempts",
    kind="histogram",
    text="Workers that an answer was tried on, without planned hand-overs; ordinarily 1.",
    unit="attempts",
    buckets=ATTEMPT_BUCKETS,
)
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of answers that started.", "tokens")
GENERATION_TOKENS = _counter("generation_tokens", "Generated tokens.", "tokens")
QUERIES = _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "tokens")
HITS = _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "tokens")
COMPUTED = _counter(
    "computed_prompt_tokens",
    "Prompt tokens that were computed, by the reason why they were not cached.",
    "tokens",
    (MODEL, "reason"),
)
STORE_QUERIES = _counter(
    "external_prefix_cache_queries", "Prompt tokens missing in the memory of the first worker.", "tokens"
)
STORE_HITS = _counter(
    "external_prefix_cache_hits", "Prompt tokens that the first worker fetched from the store.", "tokens"
)
REPLAYED = _counter(
    "replayed_tail_tokens",
    "Known tokens that a worker computed after the depth at which it resumed.",
    "tokens",
)
PLACED_AGAIN = _counter(
    "request_migrations", "Moves of an answer to another worker after a loss.", "requests"
)
HANDED_OVER = _counter("request_hand_overs", "Planned moves of an answer to another worker.", "requests")
LATE = _counter("late_first_tokens", "First tokens after their deadline.", "requests")
SUCCESS = _counter("request_success", "Answers by finish reason.", "requests", (MODEL, "finished_reason"))
ERRORS = _counter("request_errors", "Error replies by HTTP status.", "replies", ("code",))

FINISH_REASONS = ("stop", "length", "abort")
STATUSES = (400, 401, 403, 404, 413, 429, 500, 503, 504)
"""The statuses of error replies that are counted from 0 on; others are born with their first reply."""

FAILED_ROUNDS = _counter(
    "failed_rounds",
    "Failed rounds of what the process repeats, such as reading changed API keys. The reason is in its log.",
    "rounds",
    ("task",),
)
"""The rounds of kvstore/periodic.py."""

ROUTER_FAILED_ROUNDS = _counter("router_failed_rounds", "The same in the router of this model.", "rounds")

SUPERVISOR_FAILED_ROUNDS = _counter(
    "supervisor_failed_rounds", "The same in the supervisor, such as scaling.", "rounds", ()
)

EDGE = (
    *(TTFT, ITL, TPOT, E2E, QUEUE, PREFILL, DECODE, INFERENCE),
    *(PROMPT_LENGTH, ANSWER_LENGTH, HIT_DEPTH, ATTEMPTS),
    *(PROMPT_TOKENS, GENERATION_TOKENS, QUERIES, HITS, COMPUTED, STORE_QUERIES, STORE_HITS),
    *(REPLAYED, PLACED_AGAIN, HANDED_OVER, LATE, SUCCESS, ERRORS),
)
"""The metrics that the edge counts as answers pass."""

RUNNING = Spec(
    name="num_requests_running", kind="gauge", text="Open answers that do not wait.", unit="requests"
)
WAITING = Spec(
    name="num_requests_waiting",
    kind="gauge",
    text="Sequences that wait for memory of a worker, by the latest heartbeats.",
    unit="requests",
)
HELD = Spec(
    name="num_requests_held",
    kind="gauge",
    text="Requests that wait at the first router for a worker to start.",
    unit="requests",
)
USAGE = Spec(
    name="kv_cache_usage_perc",
    kind="gauge",
    text="Share of the memory budgets of all workers that running requests hold.",
    unit="share, 0 to 1",
)
EDGE_UP = Spec(
    name="edge_up",
    kind="gauge",
    text="1 if this edge process answered the scrape; 0 if its counts here are those of its last answer.",
    labels=("edge",),
)
"""The metric of the edges behind one port."""

STATE_OF_MODELS = (RUNNING, WAITING, HELD, USAGE)
"""The metrics that are computed at a scrape, from open answers and the reports of workers."""
