"""The history: rows of periods, sums over edges and models, marks of workers, and nothing older."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import (
    FakeService,
    app_over,
    call,
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
from tidemill.cluster.metrics.exposition import exposition
from tidemill.cluster.metrics.history import ALL, MARKS, ROWS, History, quantile
from tidemill.cluster.metrics.scrape import scraped
from tidemill.cluster.processes.endpoint.history_recorder import HistoryRecorder
from tidemill.cluster.rpc.codec import decode, encode

MIB = 1 << 20
FLEET = FleetStatus(workers=(worker_status("decode-0"), worker_status("decode-1")))


def counted(tokens: int = 0, ttfts_s: tuple[float, ...] = (), hits: int = 0, model: str = "a") -> EdgeMetrics:
    metrics = EdgeMetrics(lambda: 0.0)
    of_model = metrics.of_model(model)
    of_model.count_tokens(tokens, None)
    of_model.count(specs.QUERIES, 100)
    of_model.count(specs.HITS, hits)
    for ttft_s in ttfts_s:
        of_model.observe(specs.TTFT, ttft_s)
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
    first, second = counted(hits=0, model="a"), counted(hits=0, model="b")
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
    restarted = replace(FLEET.workers[0], info=replace(FLEET.workers[0].info, worker="decode-0.y"))
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


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantile_lies_in_the_bucket_of_the_value(values: list[float], share: float) -> None:
    bounds = [*specs.ITL_BUCKETS_S, float("inf")]
    buckets = [(bound, float(sum(value <= bound for value in values))) for bound in bounds]
    found = quantile(buckets, share)
    assert found is not None
    rank = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    upper = min(bound for bound in bounds if rank <= bound)
    lower = max([0.0, *(bound for bound in bounds if bound < rank)])
    assert lower <= found <= min(upper, specs.ITL_BUCKETS_S[-1])
    assert quantile([(bound, 0.0) for bound in bounds], share) is None


async def test_edge_records_and_serves_its_history() -> None:
    service = FakeService(saying(" Emma is here"))
    context = open_context([ServedBackend(service, tokenizer())], sources())
    await HistoryRecorder(context).record()
    context.metrics.of_model("keeper").count_tokens(10, None)
    object.__setattr__(context.sources, "unix_time_s", lambda: 1_700_000_133.5)
    await HistoryRecorder(context).record()
    found = context.history.json()
    assert found["models"]["keeper"][0]["tokens_per_s"] == 1.0  # pyright: ignore[reportIndexIssue] - JSON
    reply = (await asyncio.to_thread(call, app_over(service), "GET", "/cluster/history")).json()
    assert reply == {"period_s": 5.0, "quantiles": [0.5, 0.99], "models": {}, "marks": []}


def edge(*ttfts_s: float, tokens: int = 0, errors: int = 0, model: str = "a") -> EdgeMetrics:
    metrics = EdgeMetrics(lambda: 0.0)
    for ttft_s in ttfts_s:
        metrics.of_model(model).observe(specs.TTFT, ttft_s)
    metrics.of_model(model).count_tokens(tokens, None)
    for _ in range(errors):
        metrics.count_error(503)
    return metrics


def test_edge_answers_with_the_sums() -> None:
    mine, other = edge(0.1, tokens=5, errors=1), edge(0.1, 2.0, tokens=7)
    third = edge(tokens=1, model="b")
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
    metrics = edge(tokens=5)
    metrics.under_way["a"] = 3
    left = added([samples_of(metrics).ended(), samples_of(edge(tokens=1))])
    assert left.under_way["a"] == 0
    [(_, _, tokens)] = left.families[specs.GENERATION_TOKENS.full_name]
    assert tokens == 6
