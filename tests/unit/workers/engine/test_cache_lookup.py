"""The engine's part of the answer to why a prompt was not cached. Pages have four tokens."""

from dataclasses import replace

import pytest

from tests.support.workers.bench import (
    ATTENTION_ONLY,
    IN_VIRTUAL_TIME,
    TIGHT,
    Bench,
    a_request,
    a_store,
    bench,
    prompt,
    root_of,
    stored,
)
from tests.support.workers.timed_store import TimedStore
from tidemill.kvstore.keys import Kind, page_keys
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.workers.cache_lookup import CacheLookup
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.messages import Request
from tidemill.workers.scheduling.recent_texts import TEXTS_MAX, RecentTexts
from tidemill.workers.scheduling.sequence import Sequence

pytestmark = IN_VIRTUAL_TIME


def asked(tokens: tuple[int, ...], max_new_tokens: int = 1, tenant: str = "key:a", salt: str = "") -> Request:
    request = a_request(tokens, max_new_tokens)
    return replace(request, tenant=tenant, salt=salt, cache_diagnostics=True)


async def lookup(one: Bench, request: Request) -> CacheLookup:
    found = (await one.answer(request)).lookup
    assert found is not None
    return found


async def test_prompt_that_is_restored_has_no_lookup_unless_it_is_asked_for() -> None:
    async with bench() as one:
        assert (await one.answer(a_request(prompt(21)))).lookup == CacheLookup(), "computed"
        assert (await one.answer(a_request(prompt(21)))).lookup is None
        assert await lookup(one, asked(prompt(21))) == CacheLookup(matched=20)


async def test_pages_without_a_checkpoint_are_matched() -> None:
    async with bench(MemoryStore(0)) as one:
        for seed, restored in ((1, 0), (2, 0), (3, 8)):
            found = await one.answer(a_request(prompt(10) + prompt(11, seed), 1))
            assert found.reused_tokens == restored
            matched, other_text = (0, None) if seed == 1 else (8, (8, 11))
            assert found.lookup == CacheLookup(matched=matched, other_text=other_text)


@pytest.mark.parametrize("layout", [TIGHT, ATTENTION_ONLY], ids=["hybrid", "dense"])
async def test_deepest_eviction_has_the_tenant_that_needed_the_memory(layout: Layout) -> None:
    extents = 12 if layout is TIGHT else 2
    async with bench(MemoryStore(0), layout=layout, num_extents=extents) as one:
        first = asked(prompt(17), tenant="key:a")
        await one.answer(first)
        for seed in range(1, 9):
            await one.answer(asked(prompt(17, seed), tenant="key:b"))
        evicted = (await lookup(one, first)).eviction
        assert evicted is not None
        assert (evicted.depth, evicted.tenant, evicted.expired) == (16, "key:b", False)
        assert evicted.reason in {"pages", "states"}
        assert evicted.ago_s > 0


async def test_eviction_after_the_retained_time_has_expired() -> None:
    async with bench(MemoryStore(0), layout=TIGHT, num_extents=12) as one:
        first = replace(asked(prompt(17)), retain_s=0.001)
        await one.answer(first)
        for seed in range(1, 9):
            await one.answer(asked(prompt(17, seed)))
        evicted = (await lookup(one, first)).eviction
        assert evicted is not None
        assert (evicted.depth, evicted.expired) == (16, True)


@pytest.mark.parametrize("kind", [Kind.PAGE, Kind.CHECKPOINT])
async def test_damaged_object_of_the_store_is_named(kind: Kind) -> None:
    store = await stored(a_store(), a_request(prompt(21)))
    damaged = next(key for key in store.objects if key.kind is kind)
    store.objects[damaged][-1] ^= 1
    async with bench(store) as second:
        found = await lookup(second, asked(prompt(21)))
        assert (found.stored, found.store) == (20, "failed")
        assert await lookup(second, asked(prompt(21))) == CacheLookup(matched=20)


async def test_store_that_is_slow_or_down_is_named() -> None:
    inner = await stored(TimedStore(), a_request(prompt(21)), a_request(prompt(21, 1)))
    inner.opened.clear()
    async with bench(GuardedStore(inner)) as second:
        slow = await lookup(second, asked(prompt(21)))
        assert (slow.stored, slow.store) == (20, "late")
        down = await lookup(second, asked(prompt(21, 1)))
        assert (down.stored, down.store) == (0, "down")
        inner.opened.set()


async def test_first_different_token_is_found_in_texts_of_the_same_tenant_alone() -> None:
    """The answers of earlier turns are such texts, too. Other tenants learn the page."""
    async with bench(MemoryStore(0)) as one:
        turn = asked(prompt(21), 9)
        await one.answer(turn)
        answered = (*turn.tokens, *one.expected(turn))
        edited = (*answered[:26], answered[26] ^ 1, *answered[27:])
        assert (await lookup(one, asked(edited))).other_text == (26, 26)
        assert (await lookup(one, asked((*answered, 1, 2, 3)))).other_text is None, "new text"
        assert (await lookup(one, asked((*answered, 1, 2, 9)))).other_text == (32, 32), "of a last page"
        changed = (*prompt(21)[:9], prompt(21)[9] ^ 1, *prompt(21)[10:])
        assert (await lookup(one, asked(changed))).other_text == (9, 9)
        for tenant in ("key:b", ""):
            own = (*prompt(21)[:10], prompt(21)[10] ^ (2 + len(tenant)), *prompt(21)[11:])
            found = await lookup(one, asked(own, tenant=tenant))
            assert (found.matched, found.other_text) == (8, (8, 11))


async def test_same_text_under_another_salt_is_found_for_its_tenant_alone() -> None:
    async with bench(MemoryStore(0)) as one:
        await one.answer(asked(prompt(21), salt="one"))
        assert (await lookup(one, asked(prompt(21), salt="two"))).other_salt == 20
        assert (await lookup(one, asked(prompt(21), tenant="key:b", salt="three"))).other_salt == 0
        for salt in ("five", "six"):  # clients without a name are not one tenant
            assert (await lookup(one, asked(prompt(21), tenant="", salt=salt))).other_salt == 0
        unasked = replace(asked(prompt(21), salt="four"), cache_diagnostics=False)
        assert await lookup(one, unasked) == CacheLookup()


def sequence(tokens: tuple[int, ...]) -> Sequence:
    request, root = asked(tokens), root_of("")
    return Sequence(
        id="r",
        seniority=(0.0, 0),
        request=request,
        root=root,
        page_tokens=4,
        produces=False,
        tokens=list(tokens),
        target=len(tokens),
        sampling_state=SamplingState(request, None),
        drafter=None,
        keys=page_keys(root, tokens, 4),
    )


@pytest.mark.parametrize(("size", "later"), [(4, TEXTS_MAX), (21, 4)])
def test_oldest_texts_are_forgotten(size: int, later: int) -> None:
    texts = RecentTexts(tokens_max=100 if size > 4 else 1 << 17)
    texts.add(sequence(prompt(21)))
    edited = sequence((*prompt(21)[:9], 99, *prompt(21)[10:]))
    for seed in range(1, later + 1):
        assert texts.first_difference(edited, ()) == (9, True)
        texts.add(sequence(prompt(size, seed)))
    assert texts.first_difference(edited, ()) != (9, True)
    assert texts.first_difference(edited, [sequence(prompt(21))]) == (9, True), "it runs"
