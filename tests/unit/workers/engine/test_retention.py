"""Requests that say for how long their prompt is worth keeping: what stays in memory under pressure."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.workers.bench import (
    ATTENTION_ONLY,
    HYBRID,
    IN_VIRTUAL_TIME,
    TIGHT,
    WINDOWS,
    Bench,
    a_request,
    bench,
    prompt,
)
from tidemill.kvstore.layout import Layout
from tidemill.workers.messages import Request

pytestmark = IN_VIRTUAL_TIME

FIRST = prompt(90, 99)
PRESSURE = 30


def retained(
    tokens: tuple[int, ...], *, tenant: str = "", session: str = "", retain_s: float = 300.0
) -> Request:
    return replace(a_request(tokens, 3), tenant=tenant, session=session, retain_s=retain_s)


async def press(one: Bench, *, tenant: str | None = None) -> None:
    """Answer prompts that do not fit the memory; with a `tenant` each is retained."""
    for seed in range(PRESSURE):
        tokens = prompt(90, seed)
        await one.answer(a_request(tokens, 3) if tenant is None else retained(tokens, tenant=tenant))


async def reused(one: Bench, tokens: tuple[int, ...]) -> int:
    return (await one.answer(a_request(tokens, 3))).reused_tokens


@pytest.mark.parametrize("layout", [HYBRID, TIGHT, ATTENTION_ONLY, WINDOWS])
@pytest.mark.parametrize(
    ("retain_s", "wait_s", "kept"), [(0, 0, False), (300, 0, True), (300, 301, False), (1e9, 301, True)]
)
async def test_prompt_stays_under_pressure_for_the_time_of_its_request(
    layout: Layout, retain_s: float, wait_s: float, *, kept: bool
) -> None:
    async with bench(layout=layout, num_extents=EXTENTS[layout]) as one:
        await one.answer(retained(FIRST, retain_s=retain_s))
        await asyncio.sleep(wait_s)
        await press(one)
        assert (await reused(one, FIRST) == 88) is kept


EXTENTS = {HYBRID: 40, TIGHT: 140, ATTENTION_ONLY: 40, WINDOWS: 40}


async def test_breakpoints_stay_with_the_prompt() -> None:
    """Another prompt that shares its first part resumes there."""
    async with bench(num_extents=40) as one:
        await one.answer(replace(retained(FIRST), breakpoints=(40,)))
        await press(one)
        assert await reused(one, FIRST[:42] + prompt(9, 1)) == 40


async def test_greedy_tenant_does_not_push_out_what_others_retain() -> None:
    async with bench(num_extents=60) as one:
        await one.answer(retained(FIRST, tenant="modest"))
        await press(one, tenant="greedy")
        assert await reused(one, FIRST) == 88
        others = [await reused(one, prompt(90, seed)) for seed in range(PRESSURE)]
        assert 0 < others.count(88) < PRESSURE / 2


async def test_session_retains_its_last_prompt() -> None:
    """The first prompt of the session goes with those of others, the second one stays."""
    async with bench(num_extents=40) as one:
        second = prompt(90, 98)
        for tokens in (FIRST, second):
            await one.answer(retained(tokens, session="s"))
        await press(one)
        assert await reused(one, second) == 88
        assert await reused(one, FIRST) == 0


@pytest.mark.parametrize(
    ("released", "kept"), [([], True), ([("a", "p")], False), ([("b", "p"), ("a", "q")], True)]
)
async def test_prefix_stays_until_its_tenant_releases_it(
    released: list[tuple[str, str]], *, kept: bool
) -> None:
    """A prefix as `POST /v1/prefixes` computes it and `DELETE` gives it back."""
    async with bench(num_extents=40) as one:
        warmed = replace(retained(FIRST, tenant="a", session="p"), max_new_tokens=1)
        assert (await one.answer(warmed)).computed_tokens == len(FIRST)
        again = replace(warmed, request_id="again")
        assert (await one.answer(again)).reused_tokens == 88, "it is computed once"
        for tenant, name in released:
            one.engine.release(tenant, name)
        await press(one)
        assert (await reused(one, FIRST) == 88) is kept
