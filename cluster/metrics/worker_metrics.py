"""Convert the reports of workers to metric families: a series per worker, and totals for the fleet of a
model.

A counter is that of one incarnation. Its series has the worker's name, which stays, so after a restart the
counter falls, which Prometheus takes for a reset. So nothing here is a sum of counters over workers: a sum
that falls by a part would be taken for a reset as well.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

from prometheus_client.metrics_core import Metric

from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics.specs import (
    HELD,
    MODEL,
    ROUTER_FAILED_ROUNDS,
    RUNNING,
    SUPERVISOR_FAILED_ROUNDS,
    USAGE,
    WAITING,
    Spec,
)

WORKER = (MODEL, "worker", "role")


def _gauge(name: str, text: str, unit: str, *labels: str) -> Spec:
    return Spec(name=f"worker_{name}", kind="gauge", text=text, unit=unit, labels=(*WORKER, *labels))


def _counter(text: str, unit: str, *labels: str, name: str = "") -> Spec:
    return Spec(name=name, kind="counter", text=text, unit=unit, labels=(*WORKER, *labels))


GAUGES = {
    _gauge("queued_tokens", "Prompt tokens not yet computed.", "tokens"): "load.queued_tokens",
    _gauge("queued_seconds", "Predicted time of the queued tokens.", "seconds"): "load.queued_s",
    _gauge("running_rows", "Sequences in the running batch.", "sequences"): "load.running_rows",
    _gauge("waiting_rows", "Sequences that wait for memory.", "sequences"): "load.waiting_rows",
    _gauge("memory_budget_bytes", "Memory budget of the worker.", "bytes"): "load.budget_bytes",
    _gauge(
        "wanted_bytes", "Memory that waiting requests need beyond the pages that are here.", "bytes"
    ): "load.wanted_bytes",
    _gauge("state_slots", "States that running sequences hold.", "states"): "load.state_slots",
    _gauge("restorable_depths", "Prefixes that the worker can resume.", "prefixes"): "restorable_depths",
    _gauge("heard_ago_seconds", "Time since the last heartbeat.", "seconds"): "heard_ago_s",
}
"""The gauges, with the attribute of a WorkerStatus that each shows."""

MEMORY = _gauge("memory_bytes", "Memory by its use.", "bytes", "class")

STATES = {
    "store_is_down": _gauge(
        "store_is_down",
        "1 while the worker does not use the page store, because it was down or late.",
        "0 or 1",
    ),
    "torch_reserved_peak_bytes": _gauge(
        "torch_reserved_peak_bytes",
        "The most that torch has held of the device, used or not, beside an arena of kvcached.",
        "bytes",
    ),
}
"""The gauges among the counters."""

COUNTERS = {
    "failed_rounds": _counter(
        "Failed rounds of what the worker's process repeats, such as heartbeats. The reason is in its log.",
        "rounds",
    ),
    "steps": _counter("Iterations of the step loop, with idle ones.", "iterations"),
    "expert_pairs": _counter(
        "Pairs of a token and one of its experts, by the rank that has the expert; with "
        "--enable-expert-parallel.",
        "pairs",
        "rank",
    ),
    "computed_tokens": _counter(
        "Known tokens that were computed: prompts, and answers after a loss.", "tokens"
    ),
    "generated_tokens": _counter("Drawn tokens.", "tokens"),
    "preemptions": _counter(
        "Running sequences that lost their memory to other sequences.", "sequences", name="num_preemptions"
    ),
    "ownership_checks": _counter("Checks that every byte of memory has one owner.", "checks"),
    "ownership_violations": _counter(
        "Checks that failed, each of which ended the worker. Report it with the worker's log.", "checks"
    ),
    "preemptions_for_resize": _counter(
        "Running sequences that lost their memory to a smaller budget.", "sequences"
    ),
    "prefix_queried_tokens": _counter(
        "Tokens of full pages of prompts, counted at each admission, also after a preemption.", "tokens"
    ),
    "prefix_found_tokens": _counter(
        "Tokens of prompts whose pages were in the memory of the worker at admission.", "tokens"
    ),
    "prefix_resumed_tokens": _counter(
        "Tokens of prompts below the depth at which they resumed, from memory or the store.", "tokens"
    ),
    "kv_hit_without_state_tokens": _counter(
        "Tokens that were computed again because their pages had no checkpoint.", "tokens"
    ),
    "evicted_pages": _counter("Cached pages that were evicted, by reason.", "pages", "reason"),
    "evicted_checkpoints": _counter(
        "Cached checkpoints that were evicted, by reason.", "checkpoints", "reason"
    ),
    "checkpoints_skipped": _counter("Checkpoints that were skipped because memory was short.", "checkpoints"),
    "publications_skipped": _counter("Publications that were skipped because too many were in progress.", ""),
    "kv_event_batches_dropped": _counter(
        "Batches of KV events that were dropped because too many waited to be sent.", "batches"
    ),
    "fetched_bytes": _counter(
        "Pages and checkpoints fetched from the store; with vLLM, blocks pulled from other vLLMs.", "bytes"
    ),
    "fetch_seconds": _counter("Time of these fetches, summed over concurrent ones.", "seconds"),
    "published_bytes": _counter("Pages and checkpoints published to the store.", "bytes"),
    "publish_seconds": _counter("Time of publications, summed over concurrent ones.", "seconds"),
    "early_starts": _counter("Prompts that started while slices of their pages arrived.", "prompts"),
    "early_starts_lost": _counter("Those whose first step was void, as a slice did not arrive.", "prompts"),
    "fetches_late": _counter("Fetches that were abandoned because they took too long.", "fetches"),
    "fetches_failed": _counter(
        "Pulls from other vLLMs that failed, so that the prompt was computed again.", "fetches"
    ),
    "store_puts": _counter("Objects put into the store, by outcome.", "objects", "outcome"),
    "store_gets": _counter("Objects requested from the store, by outcome.", "objects", "outcome"),
    "store_put_bytes": _counter("Bytes sent to the store by the leading rank.", "bytes"),
    "store_get_bytes": _counter("Bytes received from the store by the leading rank.", "bytes"),
    "store_trips": _counter(
        "Times that the store was down or late, so that the worker stopped using it.", ""
    ),
    "spec_trials": _counter("Steps of streams with guesses.", "steps", name="spec_decode_num_drafts"),
    "spec_drafted_tokens": _counter("Guessed tokens.", "tokens", name="spec_decode_num_draft_tokens"),
    "spec_accepted_tokens": _counter(
        "Guesses that were right.", "tokens", name="spec_decode_num_accepted_tokens"
    ),
    "spec_accepted_tokens_at": _counter(
        "Guesses that were right, by their position, from 0.",
        "tokens",
        "position",
        name="spec_decode_num_accepted_tokens_per_pos",
    ),
}
"""The counters by the name that workers use. An unknown one keeps its name: a worker may be newer than this
edge."""

SPLIT = {
    "evicted_pages": "_for_",
    "evicted_checkpoints": "_for_",
    "expert_pairs": "_on_rank_",
    "store_puts": "_as_",
    "store_gets": "_as_",
    "spec_accepted_tokens_at": "_",
}
"""The counters that workers keep for each value of their last label: `evicted_pages_for_resize`."""

FROM_START = dict.fromkeys((name for name, spec in COUNTERS.items() if spec.labels == WORKER), 0.0)
"""The counters that exist before their first event: a series that is born at 1 has no increase."""

UNKNOWN = _counter("A counter of the worker since its start.", "")


def spec_of(counted: str) -> Spec:
    """Return the metric of a counter by the name that workers use."""
    if counted in STATES:
        return STATES[counted]
    spec = COUNTERS.get(counted, UNKNOWN)
    return replace(spec, name=spec.name or f"worker_{counted}")


def reported(fleets: Mapping[str, FleetStatus], under_way: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the reports of all workers at a scrape. `under_way` has the open answers of the edge, by
    model."""
    yield from _models(fleets, under_way)
    rows = [
        ([model, status.info.name, status.info.role], status)
        for model, fleet in fleets.items()
        for status in fleet.workers
    ]
    for spec, path in GAUGES.items():
        read = attrgetter(path)
        yield spec.family((labels, read(status)) for labels, status in rows)
    yield MEMORY.family(
        ([*labels, name], num_bytes)
        for labels, status in rows
        for name, num_bytes in status.load.memory.items()
    )
    families: defaultdict[str, list[tuple[list[str], float]]] = defaultdict(list)
    for labels, status in rows:
        for counted, value in (FROM_START | status.load.counters).items():
            name, *part = _split("".join(char if char.isalnum() else "_" for char in counted))
            families[name].append(([*labels, *part], value))
    for name, samples in sorted(families.items()):
        yield spec_of(name).family(samples)


def _models(fleets: Mapping[str, FleetStatus], under_way: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the totals of each model, and the count of the one supervisor, of which each router knows a
    state. Without the router the waiting requests are unknown, and all count as running."""
    waiting = {
        model: sum(worker.load.waiting_rows for worker in status.workers) for model, status in fleets.items()
    }
    held = {model: status.held for model, status in fleets.items()}
    running = {
        model: max(0, num - waiting.get(model, 0) - held.get(model, 0)) for model, num in under_way.items()
    }
    usage = {model: _usage(status) for model, status in fleets.items()}
    failed = {model: status.failed_rounds for model, status in fleets.items()}
    of_models = {RUNNING: running, WAITING: waiting, HELD: held, USAGE: usage, ROUTER_FAILED_ROUNDS: failed}
    for spec, values in of_models.items():
        yield spec.family(([model], value) for model, value in values.items())
    known = [status.supervisor_failed_rounds for status in fleets.values()]
    counts = [count for count in known if count is not None]
    yield SUPERVISOR_FAILED_ROUNDS.family([([], max(counts))] if counts else [])


def _split(counted: str) -> list[str]:
    """Return the name of a counter, and the value of its last label if the name contains one."""
    for name, separator in SPLIT.items():
        if counted.startswith(name + separator):
            return [name, counted.removeprefix(name + separator)]
    return [counted]


def _usage(status: FleetStatus) -> float:
    held = sum(worker.load.live_bytes for worker in status.workers)
    budget = sum(worker.load.budget_bytes for worker in status.workers)
    return held / budget if budget else 0.0
