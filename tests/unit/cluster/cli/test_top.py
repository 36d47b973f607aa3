"""`tidemill top`: rates, means and quantiles between two snapshots of a server, the tables, and watching."""

import json
import math
from dataclasses import replace
from io import StringIO
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from tests.support.cluster.fake_service import (
    FakeService,
    saying,
    with_server,
    worker_status,
)
from tests.unit.cluster.edge.requests.test_reading import drawn
from tidemill.cluster.cli import main as cli
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.top import (
    Snapshot,
    WorkerRow,
    compare,
    poll,
    render_top,
    show_live,
    take_snapshot,
)
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.scrape import HistogramSnapshot, scraped
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import NO_MEMORY, RequestError, Unserved, WorkerLoad

MIB = 1 << 20


def worker(name: str, heard_ago_s: float = 0.0, incarnation: str = "x", **load: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a row of GET /cluster."""
    plain: dict[str, Any] = dict.fromkeys(("running_rows", "waiting_rows", "queued_tokens"), 0)
    plain["memory"] = dict.fromkeys(("pages_live", "states_live", "windows_live"), 0)
    return {
        "model": "keeper",
        "info": {"name": name, "worker": f"{name}.{incarnation}", "role": "decode"},
        "state": "ready",
        "heard_ago_s": heard_ago_s,
        "load": plain | {"budget_bytes": 4 * MIB, "counters": {}} | load,
    }


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
    of = 'model_name="keeper"'
    counted = {"prompt_tokens": queries, "prefix_cache_queries": queries, "prefix_cache_hits": hits}
    lines = [
        f"# TYPE tidemill:{name} counter\ntidemill:{name}_total{{{of}}} {value}"
        for name, value in counted.items()
    ]
    lines += [f"# TYPE tidemill:num_requests_running gauge\ntidemill:num_requests_running{{{of}}} 7"]
    first = "tidemill:time_to_first_token_seconds"
    bounds = zip(("0.1", "1.0", "+Inf"), accumulate(ttft), strict=True)
    lines += [f"# TYPE {first} histogram"]
    lines += [f'{first}_bucket{{{of},le="{bound}"}} {count}' for bound, count in bounds]
    lines += [f"{first}_sum{{{of}}} {total_s}\n{first}_count{{{of}}} {sum(ttft)}\n"]
    return "\n".join(lines)


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
def test_quantile_lies_in_the_bucket_of_the_value(values: list[float], share: float) -> None:
    bounds = (*specs.TTFT_BUCKETS_S, math.inf)
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    quantile = HistogramSnapshot(bounds=bounds, counts=counts).quantile(share)
    value = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    upper = next(bound for bound in bounds if value <= bound)
    lower = max((bound for bound in bounds if bound < value), default=0.0)
    assert quantile is not None
    assert lower <= quantile <= min(upper, specs.TTFT_BUCKETS_S[-1])
    assert HistogramSnapshot(bounds=bounds, counts=(0.0,) * len(bounds)).quantile(share) is None


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


def test_snapshot_without_server_or_of_a_foreign_one_names_url_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TidemillError, match="--url"):
        take_snapshot(ServerAddress("http://127.0.0.1:9"), 0.0)

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


def show(*items: str | Exception, terminal: bool = False) -> str:
    """Return the output for these views, after which Ctrl-C ends the command."""
    left = list(items)

    def fetch() -> str:
        if not left:
            raise KeyboardInterrupt
        item = left.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    console = Console(file=StringIO(), width=80, force_terminal=terminal)
    show_live(poll(fetch, lambda: None), Text, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_show_live_restores_terminal_screen() -> None:
    assert "\x1b" not in show("one", "two")
    text = show("one", "two", terminal=True)
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is visible again"
    assert text.index("one") < text.index("two") < text.index("\x1b[?1049l")


def test_show_live_shows_error_above_last_view_and_ends_on_a_request_error() -> None:
    shown = show(Unserved("connection refused"), "one", Unserved("gone"), "two")
    before, away, after = shown.split("one\n")[:3]
    assert before == "connection refused. Trying again.\n"
    assert away == "gone. Trying again.\nThe view below is outdated.\n\n"
    assert after == "two\n"
    with pytest.raises(RequestError):
        show(RequestError("an unknown key"))


class Session:
    """Replaces the sleeps of a command; the last one raises KeyboardInterrupt."""

    def __init__(self, sleeps: int) -> None:
        self.left = sleeps
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def run(self, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr(cli.time, "sleep", self.sleep)
        options = cli.parser().parse_args(arguments)
        return options.run(options)


@pytest.mark.parametrize("command", [("status", "--watch", "0.5"), ("top", "--interval", "0.5")])
@pytest.mark.parametrize("as_json", [False, True])
def test_watching_commands_end_on_interrupt(
    command: tuple[str, ...],
    as_json: bool,  # noqa: FBT001 - a parameter of a test
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session(3)

    def run(url: str) -> int:
        arguments = (*command, "--url", url, *(("--json",) if as_json else ()))
        return session.run(*arguments, monkeypatch=monkeypatch)

    assert with_server(FakeService(saying(" a")), run) == 0
    assert set(session.slept) == {0.5}
    out = capsys.readouterr().out
    num_frames = 3 if command[0] == "status" else 2  # a rate takes two snapshots
    if as_json:
        assert len([json.loads(line) for line in out.splitlines()]) == num_frames
    else:
        assert out.count("prefill-0") % num_frames == 0
        assert "prefill-0" in out


def test_watch_json_prints_nothing_while_server_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    assert Session(2).run("status", "--url", url, "--watch", "--json", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Trying again.") == 2
