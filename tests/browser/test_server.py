"""A click-through over a real server with the bundled model."""

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import expect

from tests.support.browser.pages import Pages
from tests.support.e2e.server import Server, eventually

PROMPT = "The keeper keeps the lamp in the attic. " * 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    with Server(
        ["keeper", "--port", "0", "--prefill", "1", "--decode", "1", "--memory", "64MiB"], folder / "log"
    ) as server:
        yield server


def test_prompt_its_route_and_a_drain(server: Server, pages: Pages) -> None:
    page = pages.open(server.url)
    expect(page.locator(".worker h3")).to_have_text(["decode-0", "prefill-0"])
    expect(page.locator("#connection")).to_have_text("live, 2 workers")

    page.get_by_label("plain prompt").check()
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_role("button", name="Send").click()
    route = page.locator("#route li")
    expect(route.first).to_contain_text("prefill-0 computed")
    expect(page.locator("#answer")).not_to_be_empty()
    (row,) = httpx.get(f"{server.url}/cluster/requests", timeout=60).json()["requests"]
    details = row["prompt_tokens_details"]
    assert details["prefilled_tokens"] == row["prefill_depth"] > 0
    assert (
        details["fetched_tokens"] + details["replayed_tokens"] + details["reused_tokens"]
        == row["prompt_tokens"]
    )
    expect(page.locator("#waterfall-times")).to_contain_text("prefill: computed")
    expect(page.locator("#waterfall-times")).to_contain_text("decode: computed")
    assert sum(row["prefill_times"].values()) + sum(row["decode_times"].values()) <= row["ttft_s"]
    expect(route.nth(1)).to_contain_text(f"fetched {details['fetched_tokens']} from the store")
    expect(page.locator("#requests [data-part=id]")).to_have_text(row["request_id"])

    page.get_by_role("button", name="Send").click()
    expect(route.first).to_have_text("no prefill worker was needed")
    expect(page.locator("#requests tr")).to_have_count(2)
    expect(page.locator("#figure-hits")).not_to_have_text("0 %")

    card = page.locator(".worker", has=page.get_by_role("heading", name="prefill-0"))
    page.get_by_role("button", name="Drain prefill-0").click()
    page.locator("#drain-go").click()
    expect(page.locator("#drain-error")).to_contain_text("only worker that takes prompts")
    page.get_by_role("button", name="Drain anyway").click()
    expect(card.locator(".state")).to_contain_text("draining")
    eventually(lambda: server.workers("prefill")[0]["state"] == "draining")
    page.get_by_role("button", name="Undrain prefill-0").click()
    page.locator("#drain-go").click()
    expect(card.locator(".state")).to_contain_text("ready")
