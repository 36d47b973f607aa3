"""Sums over edges: counters and histograms add up, starts do not, and what an edge counted outlives it."""

from dataclasses import replace

import pytest

from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.edge_metrics import EdgeMetrics
from tidemill.cluster.metrics.edge_samples import EdgeSamples, added, samples_of
from tidemill.cluster.metrics.exposition import exposition
from tidemill.cluster.metrics.scrape import scraped
from tidemill.cluster.rpc.codec import decode, encode


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


def test_own_values_are_those_of_one_edge() -> None:
    metrics = edge(0.1, tokens=5, errors=2)
    assert exposition(metrics, {}) == exposition(metrics, {}, replace(samples_of(metrics), up={"0": True}))


def test_counts_outlive_an_edge_and_open_answers_do_not() -> None:
    metrics = edge(tokens=5)
    metrics.under_way["a"] = 3
    left = added([samples_of(metrics).ended(), samples_of(edge(tokens=1))])
    assert left.under_way["a"] == 0
    [(_, _, tokens)] = left.families[specs.GENERATION_TOKENS.full_name]
    assert tokens == 6
