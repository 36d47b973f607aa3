"""What the edge measures, as data: names, units, labels, buckets. Workers' reports are in metric_reports.py.

Base names, units and meanings are those that operators of vLLM know, where there is such a thing there.
"""

from dataclasses import dataclass
from typing import Literal

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
    """One metric. `name` is without the prefix, and of a counter without the `_total` that it ends in."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    unit: str = ""
    labels: tuple[str, ...] = (MODEL,)
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _seconds(name: str, text: str, buckets: tuple[float, ...] = PART_BUCKETS_S) -> Spec:
    return Spec(name=name, kind="histogram", text=text, unit="seconds", buckets=buckets)


def _tokens(name: str, text: str, buckets: tuple[float, ...] = TOKEN_BUCKETS) -> Spec:
    return Spec(name=name, kind="histogram", text=text, unit="tokens", buckets=buckets)


def _counter(name: str, text: str, unit: str = "", labels: tuple[str, ...] = (MODEL,)) -> Spec:
    return Spec(name=name, kind="counter", text=text, unit=unit, labels=labels)


TTFT = _seconds("time_to_first_token_seconds", "From the request to its first token.", TTFT_BUCKETS_S)
ITL = _seconds("inter_token_latency_seconds", "Between the tokens of an answer.", ITL_BUCKETS_S)
TPOT = _seconds(
    "request_time_per_output_token_seconds",
    "From the first token of an answer to its last, for each token after the first.",
    ITL_BUCKETS_S,
)
E2E = _seconds("e2e_request_latency_seconds", "From the request to its last token.", E2E_BUCKETS_S)
QUEUE = _seconds(
    "request_queue_time_seconds",
    "Before the first token: at the router, and at workers for a turn and for memory.",
)
PREFILL = _seconds(
    "request_prefill_time_seconds", "The rest of the time before the first token: computing and fetching."
)
DECODE = _seconds("request_decode_time_seconds", "From the first token to the last.")
INFERENCE = _seconds("request_inference_time_seconds", "From the request to its last token, queues aside.")
PROMPT_LENGTH = _tokens("request_prompt_tokens", "Tokens of the prompt, of answers that started.")
ANSWER_LENGTH = _tokens("request_generation_tokens", "Tokens of the answer, of those that finished.")
HIT_DEPTH = _tokens(
    "request_restorable_hit_depth_tokens",
    "How deep the first worker of a request could resume its prompt, from its memory or the store.",
    DEPTH_BUCKETS,
)
ATTEMPTS = Spec(
    name="request_attempts",
    kind="histogram",
    text="Workers that were tried for an answer, planned hand-overs aside; 1 is the ordinary case.",
    unit="attempts",
    buckets=ATTEMPT_BUCKETS,
)
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of answers that started.", "tokens")
GENERATION_TOKENS = _counter("generation_tokens", "Tokens generated.", "tokens")
QUERIES = _counter("prefix_cache_queries", "Prompt tokens looked up.", "tokens")
HITS = _counter("prefix_cache_hits", "Prompt tokens that did not have to be computed.", "tokens")
STORE_QUERIES = _counter(
    "external_prefix_cache_queries", "Prompt tokens that the first worker did not have itself.", "tokens"
)
STORE_HITS = _counter(
    "external_prefix_cache_hits", "... that it fetched from the store instead of computing them.", "tokens"
)
REPLAYED = _counter(
    "replayed_tail_tokens",
    "Known tokens that a worker computed above the depth that it resumed at, to go on from there.",
    "tokens",
)
PLACED_AGAIN = _counter(
    "request_migrations", "Answers that went to another worker because of a loss, each time.", "requests"
)
HANDED_OVER = _counter(
    "request_hand_overs", "Answers that a worker handed over because it was told to, each time.", "requests"
)
LATE = _counter("late_first_tokens", "First tokens that came after their deadline.", "requests")
SUCCESS = _counter("request_success", "Answers by how they ended.", "requests", (MODEL, "finished_reason"))
ERRORS = _counter("request_errors", "Error replies by HTTP status.", "replies", ("code",))

EDGE = (
    *(TTFT, ITL, TPOT, E2E, QUEUE, PREFILL, DECODE, INFERENCE),
    *(PROMPT_LENGTH, ANSWER_LENGTH, HIT_DEPTH, ATTEMPTS),
    *(PROMPT_TOKENS, GENERATION_TOKENS, QUERIES, HITS, STORE_QUERIES, STORE_HITS),
    *(REPLAYED, PLACED_AGAIN, HANDED_OVER, LATE, SUCCESS, ERRORS),
)
"""Everything that the edge counts as answers pass through it."""

RUNNING = Spec(
    name="num_requests_running", kind="gauge", text="Answers being made that do not wait.", unit="requests"
)
WAITING = Spec(
    name="num_requests_waiting",
    kind="gauge",
    text="Sequences that wait at a worker for memory, by the workers' latest heartbeats.",
    unit="requests",
)
USAGE = Spec(
    name="kv_cache_usage_perc",
    kind="gauge",
    text="Bytes that running requests hold, pages and states, of the budgets of all workers; 1 is full.",
    unit="share, 0 to 1",
)
STATE_OF_MODELS = (RUNNING, WAITING, USAGE)
"""Put together at a scrape, from what the edge has under way and what the workers report."""
