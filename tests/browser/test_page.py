"""The page over a scripted fleet: hostile names, keys, servers that disappear."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, Route, expect

from tests.support.browser.pages import PHONE, WIDE, Pages
from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    saying,
    sources,
    tokenizer,
    worker_status,
)
from tidemill.cluster.edge.http.app import app_of
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of
from tidemill.cluster.edge.requests.context import open_context
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.messages import FleetStatus
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.edge_samples import samples_of
from tidemill.cluster.orders import Drain

HOSTILE = "<img src=x onerror=alert(1)>"
KEYS = (
    ApiKey(tenant="people", sha256=digest_of("sk-people"), operator=True),
    ApiKey(tenant="shop", sha256=digest_of("sk-shop")),
)
PLACES = "[...document.querySelectorAll('section, dd')].map((one) => one.getBoundingClientRect().top)"
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
COLORS = """() => {
  globalThis.hexOf = (name) => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].join();
  };
  const canvas = document.querySelector("#history figure:last-child canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) found.add([...data.slice(at, at + 4)].join());
  return [...found];
}"""
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


def over(services: Sequence[FakeService], keys: Sequence[ApiKey] = ()) -> FastAPI:
    return app_over(*services, keys=keys)


def ask(page: Page, prompt: str = "Who keeps the light?") -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Send").click()


def test_it_shows_workers_and_the_way_of_an_answer(pages: Pages) -> None:
    with pages.over(app_over(FakeService(saying("Nobody knows.")))) as url:
        page = pages.open(url)
        expect(page.locator(".worker h3")).to_have_text(["decode-0", "prefill-0"])
        expect(page.locator("#figure-running")).to_have_text("4")
        ask(page)
        expect(page.locator("#answer")).to_have_text("Nobody knows.")
        expect(page.locator("#route li").first).to_contain_text("prefill-0 computed 4 tokens")
        expect(page.locator("#route li").nth(1)).to_contain_text("decode-0 had 2, fetched 3 from the store")
        expect(page.locator("#requests .path")).to_contain_text("prefill-0 → decode-0")
        expect(page.locator("#requests [data-part=cache]")).to_have_text("other text")
        expect(page.locator("#misses [data-part=reason]")).to_have_text(["other text", "last page"])
        expect(page.locator("#misses [data-part=tokens]")).to_have_text(["4", "1"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["chat", "plain prompt"])
def test_both_kinds_streamed_or_whole(pages: Pages, kind: str, stream: bool) -> None:  # noqa: FBT001 - a parameter
    with pages.over(app_over(FakeService(saying("One\ntwo <b>three</b>"), per_piece=2))) as url:
        page = pages.open(url)
        page.get_by_label(kind).check()
        page.get_by_label("stream").set_checked(stream)
        ask(page)
        expect(page.locator("#route li")).to_have_count(3)
        assert page.locator("#answer").inner_text() == "One\ntwo <b>three</b>"


def test_names_are_text(pages: Pages) -> None:
    """`Pages` fails on a dialog, and on whatever the policy refuses."""
    fleet = FakeService(
        saying(HOSTILE),
        model=replace(MODEL, names=(HOSTILE,)),
        workers=(worker_status(HOSTILE), worker_status("prefill-0", "prefill", state=HOSTILE)),
    )
    other = FakeService(saying("a"), workers=(worker_status("decode-9"),))
    with pages.over(over([fleet, other])) as url:
        page = pages.open(url)
        expect(page.locator(".worker h3").first).to_have_text(HOSTILE)
        expect(page.locator("#view option")).to_have_text(["all models", HOSTILE, "keeper"])
        ask(page)
        expect(page.locator("#answer")).to_have_text(HOSTILE)
        expect(page.locator("#requests .path")).to_contain_text(HOSTILE)
        page.get_by_role("button", name=f"Drain {HOSTILE}").click()
        expect(page.locator("#drain-title")).to_have_text(f"Drain {HOSTILE}?")
        assert page.locator("img").count() == 0


def test_one_of_several_models_can_be_looked_at(pages: Pages) -> None:
    one = FakeService(saying("a"))
    other = FakeService(
        saying("b"),
        model=replace(MODEL, names=("other",)),
        workers=(worker_status("other/mixed-0", "mixed"),),
    )
    with pages.over(over([one, other])) as url:
        page = pages.open(url)
        expect(page.locator(".worker")).to_have_count(3)
        page.locator("#ask-model").select_option("other")
        ask(page)
        expect(page.locator("#answer")).to_have_text("b")
        page.get_by_label("Show").select_option("other")
        expect(page.locator(".worker h3")).to_have_text(["other/mixed-0"])
        expect(page.locator("#flow-decode-name")).to_have_text("mixed")
        page.get_by_label("Show").select_option("keeper")
        expect(page.locator("#no-requests")).to_be_visible()


def test_it_asks_for_the_key_and_forgets_it(pages: Pages) -> None:
    with pages.over(over([FakeService(saying("a"))], KEYS)) as url:
        page = pages.open(url)
        expect(page.locator("#connection")).to_have_text("needs a key")
        expect(page.locator("#playground")).to_be_hidden()
        page.locator("#key").fill("sk-wrong")
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#connection")).to_have_text("the key is not known here")
        page.locator("#key").fill("sk-people")
        page.locator("#key").press("Enter")
        expect(page.locator(".worker")).to_have_count(2)
        ask(page)
        expect(page.locator("#answer")).to_have_text("a")
        page.reload()
        expect(page.locator(".worker")).to_have_count(2)
        assert "sk-people" not in page.content()
        page.get_by_role("button", name="Forget key").click()
        expect(page.locator("#key-form")).to_be_visible()
        assert page.evaluate("sessionStorage.length + localStorage.length") == 0


def test_client_without_an_operators_key_may_ask_and_not_look(pages: Pages) -> None:
    with pages.over(over([FakeService(saying("a"))], KEYS)) as url:
        page = pages.open(url)
        page.locator("#key").fill("sk-shop")
        page.locator("#key").press("Enter")
        expect(page.locator("#no-operator")).to_be_visible()
        expect(page.locator("#fleet")).to_be_hidden()
        ask(page)
        expect(page.locator("#answer")).to_have_text("a")
        expect(page.locator("#route li").first).to_have_text(
            "a prefill worker computed 4 tokens of the prompt"
        )


def test_errors_are_shown_as_they_are(pages: Pages) -> None:
    with pages.over(app_over(FakeService(saying("a b c d"), fail_at=2))) as url:
        page = pages.open(url)
        page.get_by_label("Temperature").fill("2")
        page.get_by_label("Max tokens").fill("100000")
        ask(page)
        expect(page.locator("#answer-error")).to_contain_text("400: ")
        page.get_by_label("Max tokens").fill("5")
        ask(page)
        expect(page.locator("#answer-error")).to_contain_text("no worker is left")
        expect(page.locator("#answer-figures")).to_contain_text("error")
        expect(page.locator("#answer")).not_to_be_empty()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_answer_can_be_stopped(pages: Pages) -> None:
    service = FakeService(saying("a b c d"), stall_at=2)
    with pages.over(app_over(service)) as url:
        page = pages.open(url)
        stop = page.get_by_role("button", name="Stop")
        expect(stop).to_be_disabled()
        ask(page)
        expect(page.locator("#answer")).not_to_be_empty()
        stop.click()
        expect(page.locator("#answer-error")).to_have_text("Stopped.")
        expect(page.locator("#requests [data-part=end]")).to_have_text("abort")
        expect(page.locator("#requests [data-part=path]")).to_have_text("prefill-0 → decode-0")
        assert service.open_streams == 0


def test_server_that_was_away_is_found_again(pages: Pages) -> None:
    service = FakeService(saying("a"))
    with pages.over(app_over(service)) as url:
        page = pages.open(url)
        expect(page.locator("#connection")).to_have_text("live, 2 workers")
        page.route("**/cluster*", lambda route: route.abort())
        expect(page.locator("#connection")).to_contain_text("no answer from the server since")
        service.workers = (worker_status("decode-7"),)
        page.unroute("**/cluster*")
        expect(page.locator("#connection")).to_have_text("live, 1 worker")
        expect(page.locator(".worker[data-state=ready] h3")).to_have_text(["decode-7"])
        expect(page.locator(".worker[data-state=gone] h3")).to_have_text(["decode-0", "prefill-0"])


def test_drain_is_asked_twice_and_by_keyboard(pages: Pages) -> None:
    service = FakeService(saying("a"))
    with pages.over(app_over(service)) as url:
        page = pages.open(url)
        page.get_by_role("button", name="Drain decode-0").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="Drain decode-0?")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        assert not service.orders
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_hidden()
        assert service.orders == [Drain("decode-0")]


def test_hidden_page_sends_no_requests(pages: Pages) -> None:
    """Hidden while an answer was on its way, and between two."""
    asked: list[str] = []
    held: list[Route] = []
    service = FakeService(saying("a"))

    def hold(route: Route) -> None:
        held.append(route)

    with pages.over(app_over(service)) as url:
        page = pages.open(url)
        expect(page.locator(".worker")).to_have_count(2)
        page.on("request", lambda request: asked.append(request.url))
        page.clock.install()
        page.route("**/cluster", hold)
        with page.expect_response("**/cluster/requests*"):  # asked for after the other
            page.clock.run_for(2_000)
        asked.clear()
        page.evaluate(HIDE, arg=True)
        service.workers = (worker_status("decode-7"),)
        held[0].continue_()
        expect(page.locator("#connection")).to_have_text("live, 1 worker")
        page.unroute("**/cluster")
        page.clock.run_for(20_000)
        assert not asked
        service.workers += (worker_status("decode-8"),)
        page.evaluate(HIDE, arg=False)
        expect(page.locator("#connection")).to_have_text("live, 2 workers")
        asked.clear()
        page.evaluate(HIDE, arg=True)
        page.clock.run_for(20_000)
        assert not asked


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_it_fits_and_can_be_read(
    pages: Pages, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    workers = tuple(
        worker_status(f"decode-{index}", state=state) for index, state in enumerate(("ready", "draining"))
    )
    with pages.over(app_over(FakeService(saying("word " * 100), workers=workers))) as url:
        page = pages.open(url, size, scheme)
        expect(page.locator(".worker")).to_have_count(2)
        ask(page, "word" * 40)
        expect(page.locator("#route li")).to_have_count(3)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(CONTRAST) == []
        page.get_by_role("button", name="Drain decode-0").click()
        assert page.evaluate(CONTRAST) == []


def test_looking_again_moves_nothing_and_keeps_the_focus(pages: Pages) -> None:
    with pages.over(app_over(FakeService(saying("a")))) as url:
        page = pages.open(url)
        button = page.get_by_role("button", name="Drain decode-0")
        button.focus()
        before = page.evaluate(PLACES)
        for _ in range(2):
            with page.expect_response("**/cluster"):
                pass
        expect(button).to_be_focused()
        assert page.evaluate(PLACES) == before


def test_reference_of_the_api_loads_nothing_from_elsewhere(pages: Pages) -> None:
    """`Pages` fails on what the policy refuses, and the policy has nothing but this server."""
    with pages.over(over([FakeService(saying("a"))], KEYS)) as url:
        page = pages.open(f"{url}/docs")
        page.locator("#key").fill("sk-shop")
        page.locator("#key").press("Enter")
        completions = page.locator("section").filter(has=page.get_by_text("POST /v1/completions", exact=True))
        expect(completions).to_have_count(1)
        expect(completions.locator("tr").filter(has_text="prompt (required)")).to_have_count(1)
        expect(completions.locator("tr").filter(has_text="truncate_prompt_tokens")).to_contain_text("integer")
        expect(page.locator("#docs-error")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_history_is_drawn_with_marks_and_the_values_under_the_cursor(pages: Pages) -> None:
    """A column of the drawing has the color of each class of memory that its row has, and marks are lines."""
    service = FakeService(saying("a"))
    context = open_context([ServedBackend(service, tokenizer())], sources())
    metrics = context.metrics.of_model("keeper")
    whole = FleetStatus(workers=(worker_status("decode-0"), worker_status("prefill-0", "prefill")))
    for period in range(180):
        metrics.count_tokens(500, 0.05)
        metrics.observe(specs.TTFT, 0.3)
        metrics.count(specs.QUERIES, 100)
        metrics.count(specs.HITS, 25)
        fleet = whole if period != 90 else FleetStatus(workers=whole.workers[:1])
        context.history.add(1_700_000_000 + 5 * period, samples_of(context.metrics), {"keeper": fleet})
    with pages.over(app_of(context)) as url:
        page = pages.open(url)
        figures = page.locator("#history figure")
        expect(figures).to_have_count(5)
        expect(page.locator("#history-marks")).to_contain_text("1 starts and 1 ends")
        page.evaluate("document.querySelector('#history').scrollIntoView()")
        figures.first.locator(".u-over").hover()
        expect(figures.first.locator(".u-legend")).to_contain_text("100")
        figures.nth(1).locator(".u-over").hover()
        expect(figures.nth(1).locator(".u-legend")).to_contain_text("25 %")
        figures.nth(2).locator(".u-over").hover()
        expect(figures.nth(2).locator(".u-legend")).to_contain_text("ms")
        figures.last.locator(".u-over").hover(position={"x": 40, "y": 40})
        expect(figures.last.locator(".u-legend")).to_contain_text("2.00 MiB")
        colors = page.evaluate(COLORS)
        wanted = {
            name: page.evaluate(f"hexOf('{name}')") for name in ("--pages-live", "--free", "--bad", "--good")
        }
        assert {name for name, color in wanted.items() if color not in colors} == set()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
