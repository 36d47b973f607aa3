"""Why a prompt was not cached: a row for each reason, and who learns what of it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def spans_in(text: str) -> list[tuple[str, int, int]]:
    """Read spans as they are written below: `evicted 0-40, never_seen 40-100`."""
    found = re.findall(r"(\w+) (\d+)-(\d+)", text)
    return [(reason, int(start), int(end)) for reason, start, end in found]


Row = tuple[int, CacheLookup | None, Route, list[tuple[str, int, int]]]


def row(restored: int, expected: str, lookup: CacheLookup | None = None, **route: int) -> Row:
    """Return a row: with `elsewhere_pages`, that many pages are on another worker."""
    elsewhere = {"elsewhere": ELSEWHERE} if "elsewhere_pages" in route else {}
    return restored, lookup, replace(ROUTE, **elsewhere, **route), spans_in(expected)  # pyrefly: ignore[bad-argument-type]


def seen(**known: Any) -> CacheLookup:  # noqa: ANN401 - fields of a lookup
    depth = known.pop("evicted", None)
    return CacheLookup(eviction=depth and LookupEviction(depth, "states"), **known)


ROWS: dict[str, Row] = {
    "all is restored": row(100, ""),
    "an earlier version": row(20, "unknown 20-100"),
    "new text": row(30, "never_seen 30-100", seen(matched=30)),
    "a page of another text": row(30, "other_text 30-100", seen(matched=30, other_text=(30, 39))),
    "another token, in the middle of what is gone": row(
        30, "not_held 30-50, other_text 50-100", seen(matched=30, other_text=(57, 57))
    ),
    "another token in the last page": row(100, "", seen(matched=100, other_text=(102, 102))),
    "no checkpoint": row(20, "no_checkpoint 20-50, never_seen 50-100", seen(matched=50)),
    "an evicted state below pages that are here": row(
        0,
        "evicted 0-40, no_checkpoint 40-60, other_text 60-100",
        seen(matched=60, evicted=40, other_text=(60, 69)),
    ),
    "evicted before another text was known": row(
        0, "evicted 0-80, never_seen 80-100", seen(evicted=80, other_text=(0, 9))
    ),
    "expired": row(0, "expired 0-100", evicted(100, expired=True)),
    "on another worker": row(0, "other_worker 0-70, never_seen 70-100", evicted(40), elsewhere_pages=7),
    "less on another worker than here": row(50, "never_seen 50-100", seen(matched=50), elsewhere_pages=4),
    "on a lost worker": row(0, "not_held 0-60, never_seen 60-100", seen(), shared_pages=6),
    "the store is down": row(
        0,
        "store_down 0-80, never_seen 80-100",
        seen(store="down", evicted=30),
        elsewhere_pages=5,
        shared_pages=8,
    ),
    "the store is down, but there was no checkpoint to store": row(
        20, "no_checkpoint 20-60, never_seen 60-100", seen(store="down", matched=60), shared_pages=6
    ),
    "the store is slow": row(0, "store_slow 0-100", seen(store="late", stored=100)),
    "an object of the store is damaged": row(
        20, "fetch_failed 20-60, never_seen 60-100", seen(store="failed", stored=60), elsewhere_pages=6
    ),
    "another salt": row(0, "other_salt 0-90, never_seen 90-100", seen(other_salt=90)),
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
    found = "evicted 30-60, not_held 60-70, other_text 70-100, last_page 100-105"
    assert spans(later) == spans_in(found)
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
