"""Why a prompt was not cached: a row for each reason, and who learns what of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.cluster.edge.cache_misses import (
    cache_diagnostics,
    explain,
    operator_diagnostics,
    tenant_label,
)
from tidemill.cluster.messages import Route
from tidemill.workers.cache_lookup import MISS_REASONS, CacheLookup, CacheMiss, LookupEviction
from tidemill.workers.messages import Produced, Provenance, Request, Sampling, Times, Trace, WorkerId

ROOT = Path(__file__).resolve().parents[4]
P = 10
"""The tokens of a page. The prompt has ten full pages and five tokens."""

REQUEST = Request(request_id="r", tokens=tuple(range(105)), max_new_tokens=1, tenant="tenant:a")
DECODE, PREFILL, ELSEWHERE = map(WorkerId, ("decode-0.a", "prefill-0.b", "decode-1.c"))
ROUTE = Route(decode=DECODE, decode_address="")


def evicted(
    depth: int, *, reason: str = "states", tenant: str = "tenant:b", expired: bool = False
) -> CacheLookup:
    return CacheLookup(eviction=LookupEviction(depth, reason, 3.0, tenant, expired))


def provenance(restored: int, lookup: CacheLookup | None, end: int = 105) -> Provenance:
    times = Times(computed_s=(end - restored) / 100)
    return Provenance(reused_tokens=restored, computed_tokens=end - restored, times=times, lookup=lookup)


def spans(misses: tuple[CacheMiss, ...]) -> list[tuple[str, int, int]]:
    return [(miss.reason, miss.start, miss.end) for miss in misses]


ROWS: dict[str, tuple[int, CacheLookup | None, Route, list[tuple[str, int, int]]]] = {
    "all is restored": (100, None, ROUTE, []),
    "an earlier version": (20, None, ROUTE, [("unknown", 20, 100)]),
    "new text": (30, CacheLookup(matched=30), ROUTE, [("never_seen", 30, 100)]),
    "a page of another text": (
        30,
        CacheLookup(matched=30, other_text=(30, 39)),
        ROUTE,
        [("other_text", 30, 100)],
    ),
    "another token, in the middle of what is gone": (
        30,
        CacheLookup(matched=30, other_text=(57, 57)),
        ROUTE,
        [("not_held", 30, 50), ("other_text", 50, 100)],
    ),
    "another token in the last page": (100, CacheLookup(matched=100, other_text=(102, 102)), ROUTE, []),
    "no checkpoint": (
        20,
        CacheLookup(matched=50),
        ROUTE,
        [("no_checkpoint", 20, 50), ("never_seen", 50, 100)],
    ),
    "an evicted state below pages that are here": (
        0,
        CacheLookup(matched=60, eviction=LookupEviction(40, "states"), other_text=(60, 69)),
        ROUTE,
        [("evicted", 0, 40), ("no_checkpoint", 40, 60), ("other_text", 60, 100)],
    ),
    "evicted before another text was known": (
        0,
        CacheLookup(eviction=LookupEviction(80, "pages"), other_text=(0, 9)),
        ROUTE,
        [("evicted", 0, 80), ("never_seen", 80, 100)],
    ),
    "expired": (0, evicted(100, expired=True), ROUTE, [("expired", 0, 100)]),
    "on another worker": (
        0,
        evicted(40),
        replace(ROUTE, elsewhere=ELSEWHERE, elsewhere_pages=7),
        [("other_worker", 0, 70), ("never_seen", 70, 100)],
    ),
    "less on another worker than here": (
        50,
        CacheLookup(matched=50),
        replace(ROUTE, elsewhere=ELSEWHERE, elsewhere_pages=4),
        [("never_seen", 50, 100)],
    ),
    "on a lost worker": (
        0,
        CacheLookup(),
        replace(ROUTE, shared_pages=6),
        [("not_held", 0, 60), ("never_seen", 60, 100)],
    ),
    "the store is down": (
        0,
        CacheLookup(store="down", eviction=LookupEviction(30, "pages")),
        replace(ROUTE, elsewhere=ELSEWHERE, elsewhere_pages=5, shared_pages=8),
        [("store_down", 0, 80), ("never_seen", 80, 100)],
    ),
    "the store is down, but there was no checkpoint to store": (
        20,
        CacheLookup(store="down", matched=60),
        replace(ROUTE, shared_pages=6),
        [("no_checkpoint", 20, 60), ("never_seen", 60, 100)],
    ),
    "the store is slow": (0, CacheLookup(store="late", stored=100), ROUTE, [("store_slow", 0, 100)]),
    "an object of the store is damaged": (
        20,
        CacheLookup(store="failed", stored=60),
        replace(ROUTE, elsewhere=ELSEWHERE, elsewhere_pages=6),
        [("fetch_failed", 20, 60), ("never_seen", 60, 100)],
    ),
    "another salt": (
        0,
        CacheLookup(other_salt=90),
        ROUTE,
        [("other_salt", 0, 90), ("never_seen", 90, 100)],
    ),
}


@pytest.mark.parametrize(("restored", "lookup", "route", "expected"), ROWS.values(), ids=ROWS)
def test_reason_of_each_computed_token(
    restored: int, lookup: CacheLookup | None, route: Route, expected: list[tuple[str, int, int]]
) -> None:
    misses = explain(REQUEST, route, None, provenance(restored, lookup), P)
    assert spans(misses) == [*expected, ("last_page", 100, 105)]
    assert sum(miss.seconds for miss in misses) == pytest.approx((105 - restored) / 100)
    assert {miss.worker for miss in misses} == {DECODE}


def test_every_reason_has_a_row() -> None:
    rows = {reason for _, _, _, expected in ROWS.values() for reason, _, _ in expected}
    assert rows | {"prompt_logprobs", "last_page"} == {*MISS_REASONS}
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert [reason for reason in MISS_REASONS if f"`{reason}`" not in page] == []


def test_logprobs_of_the_prompt_are_a_reason() -> None:
    asked = replace(REQUEST, sampling=Sampling(prompt_logprobs=1))
    misses = explain(asked, ROUTE, None, provenance(0, None), P)
    assert spans(misses) == [("prompt_logprobs", 0, 100), ("last_page", 100, 105)]
    goes_on = replace(asked, scored=104)
    assert spans(explain(goes_on, ROUTE, None, provenance(100, None), P)) == [("last_page", 100, 105)]


def test_worker_that_computed_a_token_names_its_reason() -> None:
    """The decode worker fetches what the prefill worker has computed, and computes the last page."""
    route = replace(ROUTE, prefill=PREFILL)
    produced = Produced(depth=100, provenance=provenance(30, evicted(60), end=100))
    misses = explain(REQUEST, route, produced, provenance(100, None), P)
    expected = [("evicted", 30, 60), ("never_seen", 60, 100), ("last_page", 100, 105)]
    assert spans(misses) == expected
    assert [miss.worker for miss in misses] == [PREFILL, PREFILL, DECODE]
    computed_again = provenance(80, CacheLookup(matched=80, store="late", stored=100))
    again = explain(REQUEST, route, produced, computed_again, P)
    assert spans(again) == [*expected[:2], ("store_slow", 80, 100), expected[2]]
    unfetched = explain(REQUEST, route, produced, provenance(80, CacheLookup(matched=80)), P)
    assert spans(unfetched)[2:] == [("other_worker", 80, 100), expected[2]]
    assert unfetched[2].elsewhere == PREFILL, "the store did not take it"
    knows_answers = provenance(100, CacheLookup(matched=100, other_text=(73, 73)))
    later = explain(REQUEST, route, produced, knows_answers, P)
    assert spans(later) == [
        ("evicted", 30, 60),
        ("not_held", 60, 70),
        ("other_text", 70, 100),
        ("last_page", 100, 105),
    ]
    held = Produced(depth=100, provenance=Provenance(reused_tokens=100))
    assert spans(explain(REQUEST, route, held, provenance(100, None), P)) == expected[2:]


def trace(lookup: CacheLookup, restored: int = 30) -> Trace:
    found = provenance(restored, lookup)
    route = replace(ROUTE, elsewhere=ELSEWHERE, elsewhere_pages=0)
    misses = explain(REQUEST, route, None, found, P)
    return Trace(attempts=1, decode=DECODE, provenance=found, misses=misses)


def test_own_text_is_shown_only_around_an_exact_token() -> None:
    exact, page = CacheLookup(matched=30, other_text=(34, 34)), CacheLookup(matched=30, other_text=(30, 39))
    shown = cache_diagnostics(trace(exact), REQUEST, lambda tokens: " ".join(map(str, tokens)))
    assert (shown["reason"], shown["matched_tokens"], shown["restored_tokens"]) == ("other_text", 30, 30)
    assert shown["cache_missed_tokens"] == 70
    (other, last) = shown["misses"]
    assert other == {
        "reason": "other_text",
        "start": 30,
        "end": 100,
        "tokens": 70,
        "seconds": 0.7,
        "differs_at": [34, 34],
        "text": ["26 27 28 29 30 31 32 33", "34 35 36 37 38 39 40 41"],
    }
    assert last == {"reason": "last_page", "start": 100, "end": 105, "tokens": 5, "seconds": 0.05}
    for hidden in (
        cache_diagnostics(trace(exact), REQUEST),
        cache_diagnostics(trace(page), REQUEST, str),
        operator_diagnostics(trace(exact), REQUEST),
    ):
        assert "text" not in hidden["misses"][0]


@pytest.mark.parametrize(
    ("tenant", "reason", "requested_by", "label"),
    [
        ("tenant:a", "pages", "own", "a"),
        ("tenant:b", "states", "another", "b"),
        ("salt:secret", "states", "another", tenant_label("salt:secret")),
        ("", "states", "another", ""),
        ("", "resize", None, ""),
    ],
)
def test_client_learns_of_no_other_tenant(
    tenant: str, reason: str, requested_by: str | None, label: str
) -> None:
    found = trace(evicted(60, reason=reason, tenant=tenant))
    seen = cache_diagnostics(found, REQUEST)["misses"][0]
    ago_s = 3.0 if requested_by == "own" else 0.0  # that of another tenant to ten seconds
    assert (seen["memory_for"], seen["ago_s"], seen["requested_by"]) == (reason, ago_s, requested_by)
    assert "secret" not in label
    assert operator_diagnostics(found, REQUEST)["misses"][0]["evicted_for"] == label
    assert label not in map(str, seen.values()) or not label
    assert not {"worker", "elsewhere", "evicted_for"} & {*seen}


def test_hit_is_a_prompt_of_which_only_the_last_page_was_computed() -> None:
    hit = cache_diagnostics(trace(CacheLookup(), restored=100), REQUEST)
    assert (hit["reason"], hit["cache_missed_tokens"], hit["restored_tokens"]) == ("hit", 0, 100)
    assert cache_diagnostics(trace(CacheLookup(matched=30)), REQUEST)["cache_missed_tokens"] == 0, "new text"
