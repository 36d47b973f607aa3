"""What Prometheus reads after known requests; labels stay within fixed sets whatever clients send."""

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.cluster.fake_service import TRACE, FakeService, app_over, call, complete, saying
from tidemill.cluster.http.replies import cached_tokens
from tidemill.cluster.service import FleetStatus
from tidemill.workers.messages import Unserved

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(app: object) -> Samples:
    response = call(app, "GET", "/metrics")  # pyright: ignore[reportArgumentType]
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("tidemill:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_requests_are_measured() -> None:
    app = app_over(FakeService(saying(" Emma is")))
    usage = [complete(app, prompt=[5] * 9)["usage"], complete(app, prompt=[5] * 12, max_tokens=1)["usage"]]
    generated = sum(one["completion_tokens"] for one in usage)
    seen = scrape(app)
    assert seen["time_to_first_token_seconds_count", ()] == 2
    assert seen["e2e_request_latency_seconds_count", ()] == 2
    assert seen["inter_token_latency_seconds_count", ()] == generated - 2
    assert seen["inter_token_latency_seconds_sum", ()] == (generated - 2) / 64  # the clock of the tests
    assert seen["prompt_tokens_total", ()] == 21
    assert seen["generation_tokens_total", ()] == generated
    assert seen["prefix_cache_queries_total", ()] == 21
    assert seen["prefix_cache_hits_total", ()] == cached_tokens(9, TRACE) + cached_tokens(12, TRACE)
    assert seen["request_success_total", (("finished_reason", "stop"),)] == 1
    assert seen["request_success_total", (("finished_reason", "length"),)] == 1
    assert seen["num_requests_running", ()] == 0


def test_tokens_that_come_together_share_the_time_since_the_last_ones() -> None:
    app = app_over(FakeService(lambda _: [5] * 12, per_piece=4))
    complete(app, max_tokens=12)
    seen = scrape(app)
    assert seen["inter_token_latency_seconds_count", ()] == 8
    assert seen["inter_token_latency_seconds_sum", ()] == 2 / 64


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
    decode = (("role", "decode"), ("worker", "decode-0"))
    assert seen["worker_running_rows", decode] == 2
    assert seen["worker_memory_budget_bytes", decode] == 4 << 20
    assert seen["worker_wanted_bytes", decode] == 0
    assert seen["worker_state_slots", decode] == 6
    memory = {
        dict(labels)["class"]: value
        for (name, labels), value in seen.items()
        if name == "worker_memory_bytes" and ("worker", "decode-0") in labels
    }
    assert memory == {
        "pages_live": 1 << 20,
        "pages_cached": 0,
        "states_live": 0,
        "states_cached": 0,
        "free": 3 << 20,
        "empty": 0,
        "unmapped": 0,
    }
    for reason, count in (("states", 2), ("resize", 3)):
        assert seen["worker_evicted_pages_total", (("reason", reason), *decode)] == count
    assert seen["worker_pages_published_total", decode] == 5
    assert seen["worker_store_puts_total", (("outcome", "full"), *decode)] == 1
    assert seen["worker_store_gets_total", (("outcome", "corrupt"), *decode)] == 4
    assert seen["worker_store_put_bytes_total", decode] == 2048
    assert seen["worker_store_is_down", decode] == 0
    assert seen["spec_decode_num_drafts_total", decode] == 4
    assert ("worker_spec_trials_total", decode) not in seen
    assert seen["worker_pages_published_total", (("role", "prefill"), ("worker", "prefill-0"))] == 5


def test_without_a_router_the_edges_own_figures_remain() -> None:
    class Routerless(FakeService):
        async def status(self) -> FleetStatus:
            raise Unserved("the router does not answer")

    app = app_over(Routerless(saying(" a")))
    complete(app)
    assert scrape(app)["time_to_first_token_seconds_count", ()] == 1
    assert call(app, "GET", "/cluster").status_code == 503


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


def test_head_is_answered() -> None:
    assert call(app_over(FakeService(saying(" a"))), "HEAD", "/metrics").status_code == 200
