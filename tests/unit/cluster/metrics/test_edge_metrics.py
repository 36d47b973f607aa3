"""The metrics after known requests, their sums over edges and their history; labels stay in fixed sets."""

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster.fake_service import (
    TRACE,
    FakeService,
    app_over,
    call,
    complete,
    saying,
    sources,
    tokenizer,
    worker_status,
)
from tidemill.cluster.edge.requests.context import open_context
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.edge_samples import EdgeSamples, added, samples_of
from tidemill.cluster.metrics.exposition import ALIASES, exposition
from tidemill.cluster.metrics.history import ALL, MARKS, ROWS, History
from tidemill.cluster.metrics.scrape import scraped
from tidemill.cluster.metrics.worker_metrics import reported
from tidemill.cluster.processes.endpoint.history_recorder import record_period
from tidemill.cluster.rpc.codec import decode, encode
from tidemill.workers.messages import Produced, Provenance, Request, Times, Trace, Unserved, WorkerId

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

ME = (("model_name", "keeper"),)

TOKEN_S = 2 / 64
"""Two ticks of the clock of the tests: metrics ask it for each piece, and so do the recent requests."""


def read(text: str) -> Samples:
    """Return the samples without the prefix `tidemill:`; labels are in the order of their names."""
    return {
        (sample.name.removeprefix("tidemill:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(app: FastAPI) -> Samples:
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return read(response.text)


def labels(**given: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"model_name": "keeper", **given}.items()))


def test_requests_are_measured() -> None:
    app = app_over(FakeService(saying(" Emma is")))
    usage = [complete(app, prompt=[5] * 9)["usage"], complete(app, prompt=[5] * 12, max_tokens=1)["usage"]]
    generated = sum(counted["completion_tokens"] for counted in usage)
    seen = scrape(app)
    assert seen["time_to_first_token_seconds_count", ME] == 2
    assert seen["e2e_request_latency_seconds_count", ME] == 2
    assert seen["inter_token_latency_seconds_count", ME] == generated - 2
    assert seen["inter_token_latency_seconds_sum", ME] == (generated - 2) * TOKEN_S
    assert seen["request_decode_time_seconds_sum", ME] == (generated - 2) * TOKEN_S
    assert seen["request_time_per_output_token_seconds_count", ME] == 1, "one answer has a single token"
    assert seen["request_time_per_output_token_seconds_sum", ME] == TOKEN_S
    assert seen["request_prompt_tokens_sum", ME] == seen["prompt_tokens_total", ME] == 21
    assert seen["request_generation_tokens_sum", ME] == seen["generation_tokens_total", ME] == generated
    assert seen["prefix_cache_queries_total", ME] == 21
    assert seen["prefix_cache_hits_total", ME] == TRACE.cached_tokens(9) + TRACE.cached_tokens(12)
    assert seen["request_success_total", labels(finished_reason="stop")] == 1
    assert seen["request_success_total", labels(finished_reason="length")] == 1
    assert seen["request_attempts_sum", ME] == 2
    assert seen["request_migrations_total", ME] == 0
    assert seen["num_requests_running", ME] == 0


def test_tokens_that_come_together_share_the_time_since_the_last_ones() -> None:
    app = app_over(FakeService(lambda _: [5] * 12, per_piece=4))
    complete(app, max_tokens=12)
    seen = scrape(app)
    assert seen["inter_token_latency_seconds_count", ME] == 8
    assert seen["inter_token_latency_seconds_sum", ME] == 2 * TOKEN_S


def measured(traces: list[Trace], tokens: int = 20) -> Samples:
    """Return the samples after one answer, with a token from each of `traces`; the clock ticks by a
    second."""
    now_s = iter(range(100))
    metrics = EdgeMetrics(lambda: float(next(now_s)))
    request = Request(request_id="r", tokens=(5,) * tokens, max_new_tokens=9)
    with metrics.watch("keeper", [request]) as watch:
        for index, trace in enumerate(traces):
            finish = "length" if index == len(traces) - 1 else None
            watch.record(0, num_tokens=1, finish=finish, trace=trace)
    return read(exposition(metrics, {}).decode())


def test_time_to_first_token_has_parts() -> None:
    trace = replace(
        TRACE,
        placed_s=0.125,
        produced=Produced(depth=16, provenance=Provenance(times=Times(waited_s=0.25, stored_s=9.0))),
        provenance=Provenance(fetched_tokens=16, times=Times(waited_s=0.125, computed_s=9.0)),
    )
    seen = measured([trace, trace])
    assert seen["time_to_first_token_seconds_sum", ME] == 1.0
    assert seen["request_queue_time_seconds_sum", ME] == 0.5
    assert seen["request_prefill_time_seconds_sum", ME] == 0.5
    assert seen["request_decode_time_seconds_sum", ME] == 1.0
    assert seen["request_inference_time_seconds_sum", ME] == 1.5
    assert seen["e2e_request_latency_seconds_sum", ME] == 2.0


def test_depth_is_that_of_the_first_worker() -> None:
    """Objects that the prefill worker stored were not there before."""
    seen = measured([TRACE])
    assert seen["request_restorable_hit_depth_tokens_sum", ME] == 1
    assert seen["external_prefix_cache_queries_total", ME] == 19
    assert seen["external_prefix_cache_hits_total", ME] == 0
    alone = replace(TRACE, prefill=None, produced=None)
    seen = measured([alone])
    assert seen["request_restorable_hit_depth_tokens_sum", ME] == 5
    assert seen["external_prefix_cache_queries_total", ME] == 18
    assert seen["external_prefix_cache_hits_total", ME] == 3


def test_each_way_of_an_answer_counts_its_replayed_tokens() -> None:
    found = Provenance(fetched_tokens=8, computed_tokens=4)
    again = replace(TRACE, attempts=2, hand_overs=3, provenance=found)
    seen = measured([TRACE, TRACE, again, again])
    assert seen["replayed_tail_tokens_total", ME] == 1 + 4
    assert seen["request_migrations_total", ME] == 1
    assert seen["request_hand_overs_total", ME] == 3
    assert seen["request_attempts_sum", ME] == 2
    assert seen["request_queue_time_seconds_count", ME] == 1
    cold = replace(TRACE, provenance=Provenance(computed_tokens=20))
    assert measured([cold])["replayed_tail_tokens_total", ME] == 0, "a new prompt is no replay"


def test_errors_are_counted_by_status() -> None:
    app = app_over(FakeService(saying(" a")))
    for _ in range(2):
        call(app, "POST", "/v1/completions", json={"prompt": ""})
    call(app, "GET", "/nowhere")
    call(app, "POST", "/v1/completions", content=b"x" * (5 << 20))
    seen = scrape(app)
    counts = {code: seen["request_errors_total", (("code", code),)] for code in ("400", "404", "413")}
    assert counts == {"400": 2, "404": 1, "413": 1}


def test_workers_report_through_the_edge() -> None:
    seen = scrape(app_over(FakeService(saying(" a"))))
    decode = labels(role="decode", worker="decode-0")
    empty = dict.fromkeys(
        ("pages_cached", "states_live", "states_cached", "windows_live", "windows_cached"), 0
    )
    memory = {**empty, "pages_live": 1 << 20, "free": 3 << 20, "empty": 0, "unmapped": 0}
    split = {
        ("worker_memory_bytes", "class"): memory,
        ("worker_evicted_pages_total", "reason"): {"states": 2, "resize": 3},
        ("worker_store_puts_total", "outcome"): {"stored": 6, "existed": 1, "full": 1, "skipped": 3},
        ("worker_store_gets_total", "outcome"): {"corrupt": 4, "truncated": 1},
        ("spec_decode_num_accepted_tokens_per_pos_total", "position"): {"0": 2, "1": 1},
    }
    found = {
        (name, label): {
            dict(at)[label]: value
            for (other, at), value in seen.items()
            if other == name and set(decode) <= set(at)
        }
        for name, label in split
    }
    assert found == split
    plain = {
        "worker_running_rows": 2,
        "worker_memory_budget_bytes": 4 << 20,
        "worker_wanted_bytes": 0,
        "worker_state_slots": 6,
        "worker_pages_published_total": 5,  # an unknown counter keeps its name
        "worker_store_put_bytes_total": 2048,
        "worker_store_is_down": 0,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_accepted_tokens_total": 3,
    }
    assert {name: seen[name, decode] for name in plain} == plain
    assert ("worker_spec_trials_total", decode) not in seen
    assert seen["worker_pages_published_total", labels(role="prefill", worker="prefill-0")] == 5


def fleet(*waiting: int) -> FleetStatus:
    rows = [worker_status(f"decode-{index}") for index in range(len(waiting))]
    counts = zip(rows, waiting, strict=True)
    return FleetStatus(
        workers=tuple(replace(row, load=replace(row.load, waiting_rows=count)) for row, count in counts)
    )


def test_waiting_requests_do_not_count_as_running_and_models_are_separate() -> None:
    fleets = {"a": replace(fleet(1, 2), held=1), "b": fleet(9)}
    found = reported(fleets, {"a": 6, "b": 4, "c": 3})
    families = {family.name.removeprefix("tidemill:"): family for family in found}

    def by_model(name: str) -> dict[str, float]:
        return {sample.labels["model_name"]: sample.value for sample in families[name].samples}

    assert by_model("num_requests_waiting") == {"a": 3, "b": 9}
    assert by_model("num_requests_held") == {"a": 1, "b": 0}
    assert by_model("num_requests_running") == {"a": 2, "b": 0, "c": 3}, "c's router does not answer"
    assert by_model("kv_cache_usage_perc") == {"a": 0.25, "b": 0.25}
    assert len(families["worker_waiting_rows"].samples) == 3


def test_alias_repeats_the_core_series_under_another_prefix() -> None:
    metrics = EdgeMetrics(iter(range(100)).__next__)
    with metrics.watch("keeper", [Request(request_id="r", tokens=(5,), max_new_tokens=1)]) as watch:
        watch.record(0, num_tokens=1, finish="stop", trace=TRACE)
    one = fleet(1)
    counted = replace(one.workers[0], load=replace(one.workers[0].load, counters={"preemptions": 2}))
    fleets = {"keeper": FleetStatus(workers=(counted,))}
    plain = exposition(metrics, fleets).decode()
    metrics.alias = "vllm"
    both = exposition(metrics, fleets).decode()
    assert "vllm:" not in plain
    assert both.startswith(plain)
    ours = read(plain)
    theirs = {
        (name.removeprefix("vllm:"), at): value
        for (name, at), value in read(both).items()
        if name.startswith("vllm:")
    }
    assert len(ALIASES["vllm"]) >= 12
    assert {name.removesuffix("_total").removesuffix("_count") for name, _ in theirs} >= ALIASES["vllm"]
    assert all(ours[name] == value for name, value in theirs.items())
    assert theirs["num_preemptions_total", labels(role="decode", worker="decode-0")] == 2


def test_without_a_router_the_edges_own_figures_remain() -> None:
    service = FakeService(saying(" a"))
    app = app_over(service)
    complete(app)
    service.status = AsyncMock(side_effect=Unserved("the router does not answer"))
    seen = scrape(app)
    assert seen["time_to_first_token_seconds_count", ME] == 1
    assert seen["num_requests_running", ME] == 0
    assert ("num_requests_waiting", ME) not in seen
    assert call(app, "GET", "/cluster").status_code == 503


def test_counters_of_rare_events_begin_at_zero() -> None:
    metrics = EdgeMetrics(lambda: 0.0, {"keeper": 1.0})
    seen = read(exposition(metrics, {"keeper": fleet(1)}).decode())
    zero = {sample for sample, value in seen.items() if value == 0}
    worker = labels(role="decode", worker="decode-0")
    assert {("worker_ownership_violations_total", worker), ("num_preemptions_total", worker)} <= zero
    assert ("request_migrations_total", ME) in zero
    assert ("request_errors_total", (("code", "500"),)) in zero
    assert ("request_success_total", labels(finished_reason="abort")) in zero


def test_strange_requests_add_no_labels() -> None:
    app = app_over(FakeService(saying(" a")))
    complete(app)
    call(app, "GET", "/nowhere")
    call(app, "PUT", "/metrics")
    call(app, "POST", "/v1/completions", json={"prompt": "a", "model": "none"})
    call(app, "POST", "/v1/completions", json={})
    before = scrape(app).keys()
    for index in range(20):
        call(app, "GET", f"/nowhere/{index}", headers={"x-request-id": f"r{index}"})
        call(app, f"M{index}", "/metrics")
        call(app, "POST", "/v1/completions", json={"prompt": "a", "model": f"m{index}", "user": f"u{index}"})
    assert scrape(app).keys() == before


MIB = 1 << 20
FLEET = FleetStatus(workers=(worker_status("decode-0"), worker_status("decode-1")))


def counted(
    tokens: int = 0, ttfts_s: tuple[float, ...] = (), errors: int = 0, model: str = "a"
) -> EdgeMetrics:
    metrics = EdgeMetrics(lambda: 0.0)
    of_model = metrics.of_model(model)
    of_model.count_tokens(tokens, None)
    of_model.count(specs.QUERIES, 100)
    for ttft_s in ttfts_s:
        of_model.observe(specs.TTFT, ttft_s)
    for _ in range(errors):
        metrics.count_error(503)
    return metrics


def test_row_is_what_a_period_added_over_all_edges() -> None:
    edges = [counted(tokens=10), counted(tokens=20, ttfts_s=(0.3,))]
    history = History()
    history.add(100.0, added(map(samples_of, edges)), {"a": FLEET})
    assert not history.rows
    for edge in edges:
        edge.of_model("a").count_tokens(50, 0.04 * 50)
        edge.of_model("a").count(specs.QUERIES, 50)
        edge.of_model("a").count(specs.HITS, 20)
        edge.of_model("a").observe(specs.TTFT, 0.06)
    history.add(105.0, added(map(samples_of, edges)), {"a": FLEET})
    (row,) = history.rows["a"]
    assert (row.at_s, row.tokens_per_s, row.hit_ratio) == (105.0, 20.0, 0.4)
    assert row.ttft_s == pytest.approx((0.075, 0.0995))
    assert all(0.02 <= (value or 0) <= 0.05 for value in row.itl_s)
    assert row.memory["pages_live"] == 2 * MIB
    assert history.rows[ALL][0] == row


def test_all_models_are_summed_before_ratios_are_taken() -> None:
    first, second = counted(), counted(model="b")
    history = History()
    for at_s in (0.0, 5.0):
        history.add(at_s, added(map(samples_of, (first, second))), {"a": FLEET, "b": FLEET})
        first.of_model("a").count(specs.QUERIES, 300)
        second.of_model("b").count(specs.QUERIES, 100)
        second.of_model("b").count(specs.HITS, 100)
    history.add(10.0, added(map(samples_of, (first, second))), {"a": FLEET})
    ratios = [history.rows[model][-1].hit_ratio for model in ("a", "b", ALL)]
    assert ratios == [0.0, 1.0, 0.25]
    memory = [history.rows[model][-1].memory.get("free") for model in ("a", "b", ALL)]
    assert memory == [6 * MIB, None, 6 * MIB], "the router of b does not answer"


def test_restart_of_a_worker_is_an_end_and_a_start() -> None:
    restarted = replace(FLEET.workers[0], info=replace(FLEET.workers[0].info, worker=WorkerId("decode-0.y")))
    history, samples = History(), samples_of(EdgeMetrics(lambda: 0.0))
    history.add(0.0, samples, {"a": FLEET})
    history.add(5.0, samples, {})
    history.add(10.0, samples, {"a": FleetStatus(workers=(restarted,))})
    assert [(mark.at_s, mark.worker, mark.kind) for mark in history.marks] == [
        (10.0, "decode-0.y", "start"),
        (10.0, "decode-0.x", "end"),
        (10.0, "decode-1.x", "end"),
    ]


def test_old_rows_and_marks_are_dropped() -> None:
    history, samples = History(), samples_of(counted())
    for period in range(ROWS + MARKS):
        history.add(5.0 * period, samples, {"a": FLEET if period % 2 else FleetStatus(workers=())})
    assert [len(history.rows[model]) for model in ("a", ALL)] == [ROWS, ROWS]
    assert len(history.marks) == MARKS
    assert history.rows["a"][-1].at_s == 5.0 * (ROWS + MARKS - 1)


async def test_edge_records_and_serves_its_history() -> None:
    service = FakeService(saying(" Emma is here"))
    context = open_context([ServedBackend(service, tokenizer())], sources())
    await record_period(context)
    context.metrics.of_model("keeper").count_tokens(10, None)
    object.__setattr__(context.sources, "unix_time_s", lambda: 1_700_000_133.5)
    await record_period(context)
    found: Any = context.history.json()
    assert found["models"]["keeper"][0]["tokens_per_s"] == 1.0
    reply = (await asyncio.to_thread(call, app_over(service), "GET", "/cluster/history")).json()
    assert reply == {"period_s": 5.0, "quantiles": [0.5, 0.99], "models": {}, "marks": []}


def test_edge_answers_with_the_sums() -> None:
    mine, other = counted(5, (0.1,), errors=1), counted(7, (0.1, 2.0))
    third = counted(1, model="b")
    third.under_way["b"] = 2
    sent = [decode(EdgeSamples, encode(samples_of(metrics))) for metrics in (mine, other, third)]
    found = scraped(exposition(mine, {}, added(sent)).decode())
    assert found.value(specs.GENERATION_TOKENS, "a") == 12
    assert found.value(specs.GENERATION_TOKENS, "b") == 1, "also of a model that this edge has not served"
    assert found.seen(specs.TTFT, "a").count == 3
    assert found.seen(specs.TTFT, "a").total == pytest.approx(2.2)
    assert found.values[f"{specs.ERRORS.full_name}_total", frozenset({("code", "503")})] == 1
    assert found.value(specs.RUNNING, "b") == 2
    started = [value for (name, _), value in found.values.items() if name.endswith("_created")]
    assert started
    assert max(started) < 2 * min(started), "starts are no counts"


def test_counts_outlive_an_edge_and_open_answers_do_not() -> None:
    metrics = counted(5)
    metrics.under_way["a"] = 3
    left = added([samples_of(metrics).ended(), samples_of(counted(1))])
    assert left.under_way["a"] == 0
    [(_, _, tokens)] = left.families[specs.GENERATION_TOKENS.full_name]
    assert tokens == 6
