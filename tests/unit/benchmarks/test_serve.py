"""The serving benchmark: seeded workloads with the properties they claim, and figures that add up."""

import asyncio
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random

import pytest
from benchmarks.serving.plots import plot
from benchmarks.serving.report import Run, Sample, percentile, summary, table_of
from benchmarks.serving.serve import measure
from benchmarks.serving.workloads import WORKLOADS, Item, Workload, agents
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.support.cluster.fake_service import MODEL, TRACE, FakeService, app_over, serving

pytestmark = pytest.mark.slow


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(WORKLOADS)))
def test_workloads_are_seeded_and_share_their_prefixes(seed: int, name: str) -> None:
    workload = WORKLOADS[name](Random(seed), 896)
    assert workload == WORKLOADS[name](Random(seed), 896)
    for index, item in enumerate(workload.items):
        assert item.after is None or item.after < index
        assert min(item.tokens) >= 0
        assert max(item.tokens) < 896
        earlier = [other for other in workload.items[:index] if other.group == item.group]
        assert item.position == len(earlier)
        if item.position:
            assert 0 < item.shared_tokens < len(item.tokens)
            shared = item.tokens[: item.shared_tokens]
            assert any(other.tokens[: item.shared_tokens] == shared for other in earlier)


def sample(position: int, ttft_s: float, prefilled: int, replayed: int) -> Sample:
    item = Item(
        tokens=(20,) * 1100, max_tokens=4, group=0, position=position, shared_tokens=1024 if position else 0
    )
    details = {
        "cached_tokens": 1100 - prefilled - replayed,
        "prefilled_tokens": prefilled,
        "replayed_tokens": replayed,
        "fetched_tokens": 1100 - replayed,
        "reused_tokens": 0,
    }
    return Sample(
        item=item,
        ttft_s=ttft_s,
        gaps_s=(0.01, 0.03),
        e2e_s=ttft_s + 0.04,
        prompt_tokens=1100,
        output_tokens=3,
        details=details,
    )


RUN = Run(
    workload="shared-prefix",
    concurrency=1,
    seed=0,
    page_tokens=64,
    wall_s=2,
    server_cpu_s=3,
    samples=(
        sample(0, 1.0, 1088, 12),
        sample(1, 0.9, 1088, 12),
        sample(2, 0.2, 64, 12),
        sample(3, 0.3, 128, 12),
    ),
)


def test_figures_of_a_known_run() -> None:
    figures = summary(RUN)
    assert figures["requests_per_s"] == 2
    assert figures["output_tokens_per_s"] == 6
    assert figures["server_cpu_ms_per_output_token"] == 250
    assert figures["cached_token_ratio"] == pytest.approx((1024 + 960) / 4400)
    assert figures["cached_to_findable"] == pytest.approx((1024 + 960) / (3 * 1024))
    assert figures["tokens_per_request"]["prefilled"] == 592
    assert figures["by_position"]["second"]["shared_pages_computed_mean"] == 16
    assert figures["by_position"]["rest"]["shared_pages_computed_max"] == 1
    assert figures["by_position"]["rest"]["shared_pages_computed_mean"] == 0.5
    assert figures["warm_to_cold_ttft"] == pytest.approx({"second": 0.9, "rest": 0.3})
    json.dumps(figures)
    console = Console(file=StringIO(), width=100)
    console.print(table_of(figures))
    assert isinstance(console.file, StringIO)
    assert "shared_pages_computed_max" in console.file.getvalue()


def test_run_is_plotted(tmp_path: Path) -> None:
    plot(RUN, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@given(values=st.lists(st.floats(0, 10), min_size=1))
def test_percentiles_are_values_that_were_seen(values: list[float]) -> None:
    assert percentile(values, 0) == min(values)
    assert percentile(values, 50) in values
    assert percentile(values, 100) == max(values)


def test_run_over_http() -> None:
    service = FakeService(lambda _: [5] * 100, model=replace(MODEL, max_model_len=4096))

    async def main() -> Run:
        async with serving(app_over(service)) as url:
            return await measure(url, "multi-turn", 3, 0)

    run = asyncio.run(main())
    items = WORKLOADS["multi-turn"](Random(0), MODEL.vocab_size).items
    assert [measured.item for measured in run.samples] == list(items)
    for measured in run.samples:
        assert measured.prompt_tokens == len(measured.item.tokens)
        assert measured.output_tokens == measured.item.max_tokens == len(measured.gaps_s) + 1
        assert measured.details["cached_tokens"] == TRACE.cached_tokens(measured.prompt_tokens)
    sent = [request.tokens for request in service.requests]
    for item in items:
        if item.after is not None:
            assert sent.index(items[item.after].tokens) < sent.index(item.tokens)


@pytest.mark.parametrize("hinted", ["with hints", "without"])
def test_agents_pause_and_their_hints_are_sent_on_demand(
    hinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints = hinted == "with hints"
    service = FakeService(lambda _: [5] * 100, model=replace(MODEL, max_model_len=4096))
    small = agents(Random(0), MODEL.vocab_size, sessions=1, turns=2, shared=256, strangers=1)
    small = replace(small, items=tuple(replace(item, pause_s=item.pause_s / 50) for item in small.items))

    def small_agents(rng: Random, vocab_size: int) -> Workload:
        del rng, vocab_size
        return small

    monkeypatch.setitem(WORKLOADS, "agents", small_agents)

    async def main() -> Run:
        async with serving(app_over(service)) as url:
            return await measure(url, "agents", 8, 0, hints=hints)

    run = asyncio.run(main())
    assert run.wall_s > max(item.pause_s for item in small.items)
    assert run.server_pss_mib > 0
    assert len(service.requests) == 5
    assert sorted(request.breakpoints for request in service.requests) == [()] + [(256,) if hints else ()] * 4
    assert len({request.session for request in service.requests}) == (3 if hints else 1)


def test_pauses_of_agents_have_a_long_tail() -> None:
    pauses = sorted(item.pause_s for item in agents(Random(0), 896, sessions=64).items if item.hints)
    assert pauses[len(pauses) // 2] == pytest.approx(1.0, rel=0.2)
    assert sum(pauses[-len(pauses) // 10 :]) > 0.3 * sum(pauses)
