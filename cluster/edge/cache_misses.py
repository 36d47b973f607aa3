"""Why tokens of a prompt were computed although prompts are cached: the definition. Pure.

    0            start           matched        shared       boundary   length
    |-- restored --|-- evicted, --|-- computed --|-- other ----|-- last --|
                   |  no checkpoint  elsewhere   |  text, new  |  page

Each worker that computed a part of the prompt has its own start and its own reasons. The reasons are tried in
the order of `_claims`: each one explains the tokens below its depth that none before it has explained.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from tidemill.cluster.messages import Route
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.cache_lookup import CacheMiss, MissReason
from tidemill.workers.messages import Produced, Provenance, Request, Trace, WorkerId

Json = dict[str, Any]

UNAVOIDABLE = frozenset({"never_seen", "last_page"})

FOR_REQUESTS = frozenset({"pages", "states", "windows", "clear", "run"})
"""The reasons of evictions that made room for a request; others keep to a cap, or to a smaller budget."""


def explain(
    request: Request, route: Route, produced: Produced | None, provenance: Provenance, page_tokens: int
) -> tuple[CacheMiss, ...]:
    """Return why `request`, as it was sent on this `route`, was computed where it was, from left to right on
    the prefill worker, then on the decode worker."""
    length = len(request.tokens)
    boundary = restorable_end(length, page_tokens)
    if produced is None and 0 < length - boundary == provenance.computed_tokens:  # the usual hit
        seconds = provenance.times.computed_s
        last = CacheMiss(reason="last_page", start=boundary, end=length, worker=route.decode, seconds=seconds)
        return (last,)
    elsewhere = route.elsewhere, route.elsewhere_pages * page_tokens
    parts = [_Part(route.decode, provenance, length, *elsewhere)]
    if produced is not None and route.prefill is not None:
        parts = [
            _Part(route.prefill, produced.provenance, boundary, *elsewhere),
            _Part(route.decode, provenance, length, route.prefill, boundary),
        ]
    # The decode worker knows the answers of earlier turns.
    differing = max((found for part in parts if (found := part.differing)), default=None)
    seen = max(
        route.shared_pages * page_tokens, differing[0] // page_tokens * page_tokens if differing else 0
    )
    misses: list[CacheMiss] = []
    for part in parts:
        if part.provenance.computed_tokens:
            claims = _claims(request, part, seen, differing)
            misses += _misses(part, boundary, claims, differing)
    return tuple(misses)


class _Part(NamedTuple):
    """A worker that computed a part of the prompt, up to `end`. Of the others, `elsewhere` can restore most
    of it."""

    worker: WorkerId
    provenance: Provenance
    end: int
    elsewhere: WorkerId | None
    elsewhere_depth: int

    @property
    def differing(self) -> tuple[int, int] | None:
        lookup = self.provenance.lookup
        return None if lookup is None else lookup.other_text


def _claims(
    request: Request, part: _Part, seen: int, differing: tuple[int, int] | None
) -> Iterator[tuple[MissReason, int]]:
    """Yield the reasons that apply, each with the depth to which it does, the most telling first. `seen` is
    the depth to which an earlier prompt had the same text."""
    whole, lookup = len(request.tokens), part.provenance.lookup
    if request.scored < request.to_score:
        yield "prompt_logprobs", whole
    if lookup is None:
        yield "unknown", whole
        return
    eviction = lookup.eviction
    evicted = 0 if eviction is None else eviction.depth
    match lookup.store:
        case "down":
            yield "store_down", max(part.elsewhere_depth, evicted, seen if seen > lookup.matched else 0)
        case "late":
            yield "store_slow", lookup.stored
        case "failed":
            yield "fetch_failed", lookup.stored
        case _:
            pass
    yield "other_worker", part.elsewhere_depth
    yield "expired" if eviction is not None and eviction.expired else "evicted", evicted
    yield "no_checkpoint", lookup.matched
    yield "not_held", seen
    yield "other_salt", lookup.other_salt
    if differing is not None:
        yield "other_text", whole
    yield "never_seen", whole


def _misses(
    part: _Part,
    boundary: int,
    claims: Iterable[tuple[MissReason, int]],
    differing: tuple[int, int] | None,
) -> Iterator[CacheMiss]:
    worker, provenance, end = part[:3]
    token_s = provenance.times.computed_s / provenance.computed_tokens
    eviction = None if provenance.lookup is None else provenance.lookup.eviction
    start = max(0, end - provenance.computed_tokens)
    for reason, depth in claims:
        stop = min(depth, boundary, end)
        if stop <= start or (reason == "other_text" and differing is not None and differing[1] < start):
            continue
        yield CacheMiss(
            reason=reason,
            start=start,
            end=stop,
            worker=worker,
            seconds=(stop - start) * token_s,
            eviction=eviction if reason in {"evicted", "expired"} else None,
            other_text=differing if reason == "other_text" else None,
            elsewhere=part.elsewhere if reason == "other_worker" else None,
        )
        start = stop
    if start < end:
        yield CacheMiss(
            reason="last_page", start=start, end=end, worker=worker, seconds=(end - start) * token_s
        )


TEXT_TOKENS = 8
"""The tokens of the own prompt that are shown before and after the first difference."""

Show = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""


def cache_diagnostics(trace: Trace, request: Request, show: Show | None = None) -> Json:
    """Return what a client learns of its prompt. Of others it learns only that they needed the memory, to ten
    seconds, so that no request of theirs is timed. `show` adds its own text around the first difference."""
    return _diagnostics(trace, request, lambda miss: _details(miss, request, show))


def operator_diagnostics(trace: Trace, request: Request) -> Json:
    """Return the same for operators, with the names of workers and tenants, and without text."""
    return _diagnostics(
        trace,
        request,
        lambda miss: {
            "worker": miss.worker,
            "elsewhere": miss.elsewhere,
            **_details(miss, request),
            **({} if miss.eviction is None else {"evicted_for": tenant_label(miss.eviction.tenant)}),
        },
    )


def tenant_label(tenant: str) -> str:
    """Return the name of a tenant with an API key, else a digest: a salt is a secret of its clients."""
    kind, _, name = tenant.partition(":")
    return name if kind == "tenant" else blake2b(tenant.encode(), digest_size=8).hexdigest() if tenant else ""


def first_reason(misses: Iterable[CacheMiss]) -> str:
    """Return why the reuse of a prompt ended where it did; "hit" if only its last page was computed."""
    return next((miss.reason for miss in misses if miss.reason != "last_page"), "hit")


def missed_tokens(misses: Iterable[CacheMiss]) -> int:
    """Return the computed tokens without those that no cache can have."""
    return sum(miss.end - miss.start for miss in misses if miss.reason not in UNAVOIDABLE)


def _diagnostics(trace: Trace, request: Request, details: Callable[[CacheMiss], Json]) -> Json:
    first = trace.provenance if trace.produced is None else trace.produced.provenance
    restored = trace.misses[0].start if trace.misses else len(request.tokens)
    matched = restored if first.lookup is None else max(restored, first.lookup.matched)
    return {
        "reason": first_reason(trace.misses),
        "matched_tokens": matched,
        "restored_tokens": restored,
        "cache_missed_tokens": missed_tokens(trace.misses),
        "misses": [
            {
                "reason": miss.reason,
                "start": miss.start,
                "end": miss.end,
                "tokens": miss.end - miss.start,
                "seconds": round(miss.seconds, 6),
                **details(miss),
            }
            for miss in trace.misses
        ],
    }


def _details(miss: CacheMiss, request: Request, show: Show | None = None) -> Json:
    if (evicted := miss.eviction) is not None:
        by = "own" if evicted.tenant == request.tenant else "another"
        is_own = bool(request.tenant) and by == "own"
        return {
            "memory_for": evicted.reason,
            "ago_s": round(evicted.ago_s, 3 if is_own else -1),
            "requested_by": by if evicted.reason in FOR_REQUESTS else None,
        }
    if (differing := miss.other_text) is None:
        return {}
    first, last = differing
    if show is None or first < last:
        return {"differs_at": [first, last]}
    before, after = request.tokens[max(0, first - TEXT_TOKENS) : first], request.tokens[first:]
    return {"differs_at": [first, last], "text": [show(before), show(after[:TEXT_TOKENS])]}
