"""`tidemill top`: rates, means and quantiles between two snapshots of a server, and the tables."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.fake_service import (
    FakeService,
    app_over,
    call,
    complete,
    saying,
    worker_status,
)
from tests.support.cluster.served import with_server
from tests.unit.cluster.edge.requests.test_reading import drawn
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.top import Snapshot, WorkerRow, compare, render_top, take_snapshot
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.scrape import HistogramSnapshot, Scraped, scraped
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import NO_MEMORY, Unserved, WorkerLoad

MIB = 1 << 20


def worker(name: str, heard_ago_s: float = 0.0, incarnation: str = "x", **load: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a row of GET /cluster."""
    row: dict[str, Any] = {
        "model": "keeper",
        "info": {"name": name, "worker": f"{name}.{incarnation}", "role": "decode"},
        "state": "ready",
        "heard_ago_s": heard_ago_s,
        "load": {
            "running_rows": 0,
            "waiting_rows": 0,
            "queued_tokens": 0,
            "budget_bytes": 4 * MIB,
            "memory": {"pages_live": 0, "states_live": 0, "windows_live": 0},
            "counters": {},
        },
    }
    row["load"] |= load
    return row


def snapshot(at_s: float, *workers: dict[str, Any], metrics: str = "") -> Snapshot:
    status = {"models": [{"id": "keeper"}], "workers": list(workers)}
    return Snapshot(at_s=at_s, status=status, metrics=scraped(metrics))


def only(before: dict[str, Any], after: dict[str, Any], seconds: float = 2.0) -> WorkerRow:
    (row,) = compare(snapshot(10.0, before), snapshot(10.0 + seconds, after)).workers
    return row


def test_rate_is_measured_between_heartbeats() -> None:
    before = worker("decode-0", heard_ago_s=0.9, counters={"generated_tokens": 100})
    after = worker("decode-0", heard_ago_s=0.4, counters={"generated_tokens": 350, "computed_tokens": 50})
    row = only(before, after)
    assert row.generated_tokens_per_s == pytest.approx(250 / 2.5)
    assert row.prompt_tokens_per_s == pytest.approx(50 / 2.5)


def test_rate_is_none_without_new_heartbeat_or_after_restart() -> None:
    silent = only(worker("decode-0", heard_ago_s=0.5), worker("decode-0", heard_ago_s=2.5))
    assert silent.generated_tokens_per_s is None
    restarted = only(
        worker("decode-0", incarnation="a", counters={"generated_tokens": 900}),
        worker("decode-0", incarnation="b", counters={"generated_tokens": 5}),
    )
    assert restarted.generated_tokens_per_s is None
    assert restarted.prompt_tokens_per_s is None


def test_workers_are_sorted_by_load() -> None:
    memory = {"pages_live": MIB, "states_live": MIB, "windows_live": 0}
    rows = compare(
        snapshot(0.0),
        snapshot(
            2.0,
            worker("d-idle"),
            worker("c-full", memory=memory),
            worker("b-queue", queued_tokens=10),
            worker("a-rows", running_rows=1, waiting_rows=1),
            worker("a-row", running_rows=1),
        ),
    )
    assert [row.worker for row in rows.workers] == ["a-rows", "a-row", "b-queue", "c-full", "d-idle"]
    full = rows.workers[3]
    assert (full.pages_bytes, full.states_bytes, full.used_share) == (MIB, MIB, 0.5)
    assert only(worker("a"), worker("a", budget_bytes=0)).used_share == 0.0


def metrics_text(queries: int, hits: int, ttft: tuple[int, int, int], total_s: float) -> str:
    """Return /metrics of one model; `ttft` counts first tokens within 0.1 s, within 1 s, and later."""
    label = '{model_name="keeper"}'
    first = "tidemill:time_to_first_token_seconds"
    sums = [sum(ttft[: index + 1]) for index in range(3)]
    buckets = [
        f'{first}_bucket{{model_name="keeper",le="{bound}"}} {count}'
        for bound, count in zip(("0.1", "1.0", "+Inf"), sums, strict=True)
    ]
    return "\n".join(
        [
            "# TYPE tidemill:prompt_tokens counter",
            f"tidemill:prompt_tokens_total{label} {queries}",
            "# TYPE tidemill:prefix_cache_queries counter",
            f"tidemill:prefix_cache_queries_total{label} {queries}",
            "# TYPE tidemill:prefix_cache_hits counter",
            f"tidemill:prefix_cache_hits_total{label} {hits}",
            "# TYPE tidemill:num_requests_running gauge",
            f"tidemill:num_requests_running{label} 7",
            f"# TYPE {first} histogram",
            *buckets,
            f"{first}_sum{label} {total_s}",
            f"{first}_count{label} {sum(ttft)}",
            "",
        ]
    )


def test_model_row_covers_requests_between_snapshots() -> None:
    before = snapshot(0.0, metrics=metrics_text(1000, 0, (0, 0, 50), 500.0))
    after = snapshot(4.0, metrics=metrics_text(1400, 300, (10, 10, 50), 512.0))
    (model,) = compare(before, after).models
    assert (model.model, model.running, model.waiting) == ("keeper", 7, 0)
    assert model.prompt_tokens_per_s == 100
    assert model.hit_share == pytest.approx(0.75)
    assert model.ttft_s == pytest.approx(12.0 / 20)
    assert model.ttft_p95_s == pytest.approx(0.1 + 0.9 * 0.9)
    assert (model.itl_s, model.itl_p95_s) == (None, None)
    (idle,) = compare(after, replace(after, at_s=6.0)).models
    assert (idle.prompt_tokens_per_s, idle.hit_share, idle.ttft_s) == (0.0, None, None)


def test_model_row_counts_from_zero_after_server_restart() -> None:
    before = snapshot(0.0, metrics=metrics_text(1000, 0, (0, 0, 50), 500.0))
    after = snapshot(4.0, metrics=metrics_text(40, 10, (4, 0, 0), 0.2))
    (model,) = compare(before, after).models
    assert model.prompt_tokens_per_s == 10
    assert model.hit_share == pytest.approx(0.25)
    assert model.ttft_s == pytest.approx(0.05)


@given(st.lists(st.floats(0, 20), min_size=1), st.floats(0.01, 1))
def test_quantile_lies_in_bucket_of_value(values: list[float], share: float) -> None:
    bounds = (*specs.TTFT_BUCKETS_S, math.inf)
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    quantile = HistogramSnapshot(total=sum(values), bounds=bounds, counts=counts).quantile(share)
    value = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    upper = next(bound for bound in bounds if value <= bound)
    lower = max((bound for bound in bounds if bound < value), default=0.0)
    assert quantile is not None
    assert lower <= quantile <= upper


def test_empty_histogram_has_no_quantile_and_no_mean() -> None:
    assert HistogramSnapshot().quantile(0.5) is None
    assert HistogramSnapshot(bounds=(1.0, math.inf), counts=(0.0, 0.0)).mean() is None
    assert Scraped().value(specs.RUNNING, "keeper") == 0.0
    assert Scraped().seen(specs.TTFT, "keeper") == HistogramSnapshot()


def test_top_reads_metric_names_of_server() -> None:
    app = app_over(FakeService(saying(" a b c d")))
    complete(app)
    metrics = scraped(call(app, "GET", "/metrics").text)
    for spec in (specs.PROMPT_TOKENS, specs.GENERATION_TOKENS, specs.QUERIES):
        assert metrics.value(spec, "keeper") > 0, spec.name
    assert any(name == f"{specs.HITS.full_name}_total" for name, _ in metrics.values)
    assert metrics.seen(specs.TTFT, "keeper").count == 1
    assert metrics.seen(specs.ITL, "keeper").count == 4
    assert metrics.seen(specs.TTFT, "keeper").mean() is not None


def test_top_tables_fit_and_escape_names() -> None:
    busy = replace(
        worker_status("[red]d-1"),
        state="draining",
        load=WorkerLoad(
            running_rows=128,
            waiting_rows=1024,
            queued_tokens=1_234_567,
            memory=NO_MEMORY | {"pages_live": 999 << 30, "states_live": 999 << 30},
            budget_bytes=999 << 31,
        ),
    )
    service = FakeService(saying(" a"), workers=(worker_status("prefill-0", "prefill"), busy))
    after = with_server(service, lambda url: take_snapshot(ServerAddress(url), 2.0))
    shown = drawn(render_top(compare(replace(after, at_s=0.0), after)))
    (line,) = [" ".join(line.split()) for line in shown.splitlines() if "d-1" in line]
    assert line == "[red]d-1 draining 128 1,024 1.23M 0 0 999 GiB 999 GiB 100%"
    assert "keeper" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "no worker is alive" in drawn(render_top(compare(snapshot(0.0), snapshot(1.0))))


def test_snapshot_of_foreign_server_names_url_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def page(server: ServerAddress, path: str) -> str:
        return f"<html>{server.url}{path}"

    monkeypatch.setattr("tidemill.cluster.cli.top.ask_text", page)
    with pytest.raises(Unserved, match="--url"):
        with_server(FakeService(saying(" a")), lambda url: take_snapshot(ServerAddress(url), 0.0))


def test_top_once_prints_single_frame(capsys: pytest.CaptureFixture[str]) -> None:
    def main(url: str) -> None:
        for arguments in ((), ("--json",)):
            options = cli.parser().parse_args(
                ["top", "--url", url, "--once", "--interval", "0.1", *arguments]
            )
            assert options.run(options) == 0

    with_server(FakeService(saying(" a")), main)
    table, _, as_json = capsys.readouterr().out.partition("{")
    assert "decode-0" in table
    read = json.loads("{" + as_json)
    assert [row["worker"] for row in read["workers"]] == ["decode-0", "prefill-0"]
    assert read["models"][0]["hit_share"] is None
    assert read["seconds"] >= 0.1


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "often"])
def test_top_refuses_wrong_interval(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["top", f"--interval={interval}"])
    assert "is no time" in capsys.readouterr().err


def test_snapshot_without_server_names_url_option() -> None:
    with pytest.raises(TidemillError, match="--url"):
        take_snapshot(ServerAddress("http://127.0.0.1:9"), 0.0)
