"""Read GET /metrics of vLLM: the facts of a server, and its totals. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLE = re.compile(rb"^vllm:(\w+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
LABEL = re.compile(rb'(\w+)="([^"]*)"')

COUNTERS = {
    "iteration_tokens_total_count": "steps",
    "request_prefill_kv_computed_tokens_sum": "computed_tokens",
    "generation_tokens_total": "generated_tokens",
    "num_preemptions_total": "preemptions",
    "prefix_cache_queries_total": "prefix_queried_tokens",
    "prefix_cache_hits_total": "prefix_resumed_tokens",
    "nixl_bytes_transferred_sum": "fetched_bytes",
    "nixl_xfer_time_seconds_sum": "fetch_seconds",
    "nixl_num_failed_transfers_total": "fetches_failed",
}
"""The totals of vLLM that our own engine counts, too, with their names there."""

CACHE = "cache_config_info"


@dataclass(frozen=True, slots=True)
class Metrics:
    """The sums of vLLM's samples over its engines, by name, and the labels of the cache's configuration."""

    values: Mapping[str, float]
    cache: Mapping[str, str]

    @classmethod
    def parse(cls, text: bytes) -> "Metrics":
        values: dict[str, float] = {}
        cache: dict[str, str] = {}
        for name, labels, value in SAMPLE.findall(text):
            key = name.decode()
            if not key.endswith("_bucket"):
                values[key] = values.get(key, 0.0) + float(value)
            if key == CACHE:
                cache = {label.decode(): given.decode() for label, given in LABEL.findall(labels)}
        return cls(values, cache)

    @property
    def page_tokens(self) -> int:
        """The tokens of a block, which prefixes are shared by; 1 if it is unknown."""
        return self._number("block_size") or 1

    @property
    def num_pages(self) -> int:
        return self._number("num_gpu_blocks")

    @property
    def memory_bytes(self) -> int:
        """The bytes of all blocks; where vLLM does not report them, their tokens stand for them."""
        return self._number("kv_cache_memory_bytes") or self.num_pages * self.page_tokens

    @property
    def keeps_states(self) -> bool:
        """Return whether a prefix needs the state at its end, as in hybrid models."""
        return self.cache.get("mamba_cache_mode", "none") != "none"

    @property
    def usage(self) -> float:
        """The share of the blocks in use by requests, or kept for other servers."""
        return self.values.get("kv_cache_usage_perc", 0.0)

    @property
    def steps(self) -> float:
        return self.values.get("iteration_tokens_total_count", 0.0)

    @property
    def running(self) -> float:
        """The number of requests that its steps run."""
        return self.values.get("num_requests_running", 0.0)

    @property
    def fetch_bytes_per_s(self) -> float:
        """The speed at which blocks are pulled from other servers; 0 before the first ones."""
        seconds = self.values.get("nixl_xfer_time_seconds_sum", 0.0)
        return self.values.get("nixl_bytes_transferred_sum", 0.0) / seconds if seconds else 0.0

    def counters(self) -> dict[str, float]:
        return {ours: self.values[theirs] for theirs, ours in COUNTERS.items() if theirs in self.values}

    def _number(self, label: str) -> int:
        value = self.cache.get(label, "")
        return int(value) if value.isdecimal() else 0
