"""One request against scripted workers: whatever is lost, each token arrives exactly once."""

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.scripted_peers import (
    FETCHED,
    GAP_TOKENS_MAX,
    INFO,
    PROMPT,
    Act,
    Hold,
    P,
    Script,
    a_request,
    check_answer,
    nth_token,
    pieces_of,
    root_of,
    run,
)
from tidemill.cluster.edge.flow import (
    ATTEMPTS_MAX,
    HAND_OVERS_MAX,
    PATIENT_ATTEMPTS,
    content_hash_of,
    serve,
    with_shared_end,
)
from tidemill.kvstore.errors import OutOfMemory, TidemillError
from tidemill.kvstore.keys import page_keys
from tidemill.workers.inbox import Enough, generated
from tidemill.workers.messages import (
    ANNOUNCED_KEY_BYTES,
    CrashedAlone,
    HandedOver,
    LostAlone,
    PagesMissing,
    Poisonous,
    Produced,
    Provenance,
    Request,
    RequestError,
    Sampling,
    StreamPiece,
    Unserved,
    WorkerGone,
)

ends = st.sampled_from([None, WorkerGone("w"), PagesMissing("m")])
acts = st.builds(
    Act,
    prefill=st.booleans(),
    prefetch=st.sampled_from([None, "ends", WorkerGone("d"), PagesMissing("m"), RequestError("r")]),
    produce_turns=st.integers(0, 3),
    produce=st.just(Produced(depth=8, provenance=Provenance()))
    | st.sampled_from([WorkerGone("w"), PagesMissing("m")]),
    scores=st.integers(0, 9),
    tokens=st.integers(0, 4),
    per_delta=st.integers(1, 3),
    end=ends,
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(acts, max_size=ATTEMPTS_MAX - 1),
    st.integers(1, 12),
    st.sampled_from([None, None, 0, 2]),
)
def test_whatever_is_lost_each_token_arrives_once(
    losses: list[Act], max_new_tokens: int, prompt_logprobs: int | None
) -> None:
    request = a_request(max_new_tokens, prompt_logprobs)
    script = Script(*losses, Act())
    check_answer(pieces_of(script, request), request)
    generated = [sent for kind, sent in script.calls if kind == "generate"]
    assert script.closed == len(generated), "every stream is closed"
    assert script.prefetching == 0
    for ask, following in zip(script.asks, script.asks[1:], strict=False):
        assert ask.num_tokens <= following.num_tokens
        assert ask.avoid <= following.avoid
    for _, sent in script.calls:
        done = len(sent.tokens) - len(PROMPT)
        assert sent.tokens == PROMPT + tuple(map(nth_token, range(len(PROMPT), len(PROMPT) + done)))
        assert sent.max_new_tokens == max_new_tokens - done


def test_way_of_an_undisturbed_request() -> None:
    script = Script(Act())
    script.queue_offset_s = -3.0
    first, second = pieces_of(script, a_request(2))
    assert first.trace is second.trace
    trace = first.trace
    assert (trace.attempts, trace.prefill, trace.decode) == (1, "p.1", "d.1")
    assert (trace.produced, trace.provenance) == (Produced(depth=8, provenance=Provenance()), FETCHED)
    (ask,) = script.asks
    keys = page_keys(root_of("s"), PROMPT[:8], P)
    assert ask.keys == tuple(key[:ANNOUNCED_KEY_BYTES] for key in keys)
    assert (ask.request_id, ask.num_tokens, ask.max_new_tokens, ask.avoid) == ("r", 10, 2, frozenset())
    assert [(kind, sent.queue_offset_s) for kind, sent in script.calls] == [("produce", -3), ("generate", -3)]
    assert script.lost_workers == []
    script = Script(Act())
    pieces_of(script, Request(request_id="r", tokens=tuple(range(8)), max_new_tokens=1))
    assert len(script.asks[0].keys) == 1, "the last token is never asked for as a page"


def test_misses_are_those_of_the_attempt_that_its_trace_is_of() -> None:
    """Another worker computes the prompt and what was streamed after a loss."""
    script = Script(Act(prefill=False, tokens=3, end=WorkerGone("d")), Act(prefill=False))
    pieces = pieces_of(script, a_request(6))
    first, *_, last = dict.fromkeys(piece.trace for piece in pieces)
    assert (first.attempts, last.attempts) == (1, 2)
    for trace, num_tokens in ((first, len(PROMPT)), (last, len(PROMPT) + 3)):
        assert {miss.worker for miss in trace.misses} == {trace.decode}
        assert trace.misses[-1].end == num_tokens
        computed = sum(miss.end - miss.start for miss in trace.misses)
        assert computed == trace.provenance.computed_tokens


def test_decode_worker_gets_what_the_prefill_worker_of_its_attempt_gave() -> None:
    first = Act(
        produce=Produced(depth=8, provenance=Provenance(), handoff=b"h"), tokens=1, end=WorkerGone("d")
    )
    script = Script(first, Act(prefill=False))
    pieces_of(script, a_request(6))
    assert [(kind, sent.handoff) for kind, sent in script.calls] == [
        ("produce", None),
        ("generate", b"h"),
        ("generate", None),
    ]


def test_prompt_without_a_hop() -> None:
    script = Script(Act(prefill=False))
    (piece,) = pieces_of(script, a_request(1))
    assert [kind for kind, _ in script.calls] == ["generate"]
    assert (piece.trace.prefill, piece.trace.produced) == (None, None)
    assert script.calls[0][1].gap_tokens_max is None
    assert script.prefetched == []


def test_logprobs_of_the_prompt_are_computed_where_it_is_answered_and_go_on_after_a_loss() -> None:
    script = Script(
        Act(prefill=False, scores=5, end=WorkerGone("d")),
        Act(prefill=False, tokens=2, end=WorkerGone("d")),
        Act(),
    )
    request = a_request(prompt_logprobs=1)
    check_answer(pieces_of(script, request), request)
    assert [ask.recompute_all for ask in script.asks] == [True, True, False]
    assert [len(ask.keys) for ask in script.asks] == [0, 5 // P, 11 // P]
    assert [sent.scored for kind, sent in script.calls if kind == "generate"] == [0, 5, 9]


@pytest.mark.parametrize(
    ("acts", "lost", "avoid", "attempts"),
    [
        ([Act(produce=WorkerGone("p")), Act()], "p.1", {"p.1"}, [2] * 6),
        ([Act(tokens=3, end=WorkerGone("d")), Act()], "d.1", {"d.1"}, [1] * 3 + [2] * 3),
        ([Act(tokens=2), Act()], "d.1", {"d.1"}, [1] * 2 + [2] * 4),
        ([Act(end=WorkerGone("d"))], "", None, [1] * 6),
        ([Act(produce=HandedOver("p")), Act()], "", {"p.1"}, [1] * 6),
        ([*[Act(tokens=1, end=HandedOver("d"))] * 5, Act()], "", {"d.1"}, [1] * 6),
    ],
)
def test_losses_are_reported_and_count_attempts_and_hand_overs_do_not(
    acts: list[Act], lost: str, avoid: set[str] | None, attempts: list[int]
) -> None:
    script = Script(*acts)
    pieces = pieces_of(script, a_request())
    check_answer(pieces, a_request())
    assert script.lost_workers == ([lost] if lost else [])
    assert [ask.avoid for ask in script.asks[1:2]] == ([] if avoid is None else [avoid])
    assert [piece.trace.attempts for piece in pieces] == attempts
    assert {sent.on_trial for _, sent in script.calls} == ({False, True} if lost else {False})
    if len(acts) == 2:
        streamed = acts[0].tokens if isinstance(acts[0].produce, Produced) else 0
        assert script.asks[1].num_tokens == len(PROMPT) + streamed
        assert len(script.asks[1].keys) == (len(PROMPT) + streamed - 1) // P


def test_stream_of_an_inexact_engine_is_tried_again_only_before_it_begins() -> None:
    info = replace(INFO, exact=False)
    check_answer(
        pieces_of(Script(Act(end=WorkerGone("d"), tokens=0), Act()), a_request(), info=info), a_request()
    )
    script = Script(Act(tokens=3, end=WorkerGone("d")), Act())
    with pytest.raises(Unserved, match="cannot continue a stream exactly"):
        pieces_of(script, a_request(), info=info)
    assert script.lost_workers == ["d.1"]


def test_stream_with_what_the_engine_starts_again_ends_with_its_worker() -> None:
    info = replace(INFO, inexact_with=("penalties", "seed"))
    lost = Act(tokens=3, end=WorkerGone("d"))
    for sampling, continues in (
        (Sampling(temperature=0.7, seed=3), True),  # the seed is ours
        (Sampling(temperature=0.0, seed=3, seeded=True), True),
        (Sampling(temperature=0.7, seed=3, seeded=True), False),
        (Sampling(frequency_penalty=0.5), False),
        (Sampling(repetition_penalty=1.5), True),  # counts the prompt as well
    ):
        request = replace(a_request(), sampling=sampling)
        if continues:
            check_answer(pieces_of(Script(lost, Act()), request, info=info), request)
            continue
        with pytest.raises(Unserved, match=r"cannot continue a stream exactly with (seed|penalties)$"):
            pieces_of(Script(lost, Act()), request, info=info)
        unbegun = Script(Act(tokens=0, end=WorkerGone("d")), Act())
        check_answer(pieces_of(unbegun, request, info=info), request)


def test_request_that_the_engine_refuses_is_placed_nowhere() -> None:
    info = replace(INFO, refuses=("bad_words", "pooling", "prompt_logprobs"))
    script = Script(Act())
    request = replace(a_request(), sampling=Sampling(bad_words=((1,),), prompt_logprobs=0))
    with pytest.raises(RequestError, match="has no bad_words and prompt_logprobs: leave that out"):
        pieces_of(script, request, info=info)
    assert not script.asks


def test_missing_pages_are_nobodys_fault_and_end_the_patience() -> None:
    """The first attempts insist on pages; then the decode worker may compute whatever is missing."""
    missing = Act(tokens=0, end=PagesMissing("m"))
    script = Script(*[missing] * 5, Act())
    check_answer(pieces_of(script, a_request()), a_request())
    assert script.lost_workers == []
    assert all(ask.avoid == frozenset() for ask in script.asks)
    gaps = [sent.gap_tokens_max for kind, sent in script.calls if kind == "generate"]
    assert gaps == [GAP_TOKENS_MAX] * PATIENT_ATTEMPTS + [None] * (6 - PATIENT_ATTEMPTS)


@pytest.mark.parametrize(("depth", "gap_tokens_max"), [(8, GAP_TOKENS_MAX), (4, None), (0, None)])
def test_pages_that_the_store_refused_are_not_insisted_on(depth: int, gap_tokens_max: int | None) -> None:
    """A store that takes nothing makes answers slow; waiting for it would not make them faster."""
    script = Script(Act(produce=Produced(depth=depth, provenance=Provenance())))
    pieces = pieces_of(script, a_request(1))
    assert [kind for kind, _ in script.calls] == ["produce", "generate"]
    assert script.calls[1][1].gap_tokens_max == gap_tokens_max
    assert pieces[0].trace.produced == Produced(depth=depth, provenance=Provenance())


@pytest.mark.parametrize(
    ("end", "error", "message", "attempts"),
    [
        (WorkerGone("d"), Unserved, str(ATTEMPTS_MAX), ATTEMPTS_MAX),
        (HandedOver("d"), Unserved, "handed it over", HAND_OVERS_MAX + 1),
        (RequestError("too long"), RequestError, "too long", 1),
    ],
)
def test_attempts_have_an_end(
    end: TidemillError, error: type[TidemillError], message: str, attempts: int
) -> None:
    script = Script(Act(tokens=0, end=end))
    with pytest.raises(error, match=message):
        pieces_of(script, a_request())
    assert len(script.asks) == attempts
    assert script.asks[-1].avoid == {f"d.{attempt}" for attempt in range(1, attempts)}


def test_client_that_hangs_up_closes_the_stream() -> None:
    script = Script(Act())

    def hang_up(_: StreamPiece) -> None:
        raise Enough

    with pytest.raises(Enough):
        run(serve(a_request(), script, script, root_of, INFO, hang_up))
    assert script.closed == 1


def test_every_attempt_waits_as_long_as_workers_may_take_to_start() -> None:
    script = Script(Act(tokens=0, end=WorkerGone("d")), Act())
    pieces_of(script, a_request(), wait_s_max=300.0)
    assert [ask.wait_s_max for ask in script.asks] == [300.0, 300.0]
    script = Script(Act())
    pieces_of(script, replace(a_request(), ttft_s_max=100.0), wait_s_max=300.0)
    assert [ask.wait_s_max for ask in script.asks] == [100.0], "its client waits no longer"


def test_after_a_loss_it_is_on_trial_and_was_accepted() -> None:
    request = replace(a_request(), ttft_s_max=5.0, tenant="t")
    script = Script(Act(tokens=0, end=PagesMissing("m")), Act(tokens=2, end=WorkerGone("d")), Act())
    check_answer(pieces_of(script, request), request)
    sent = [call.on_trial for kind, call in script.calls if kind == "generate"]
    assert sent == [False, False, True]
    assert [(ask.ttft_s_max, ask.resumed) for ask in script.asks] == [(5.0, False), (5.0, True), (5.0, True)]
    assert [ask.wait_s_max for ask in script.asks] == [5.0, 60.0, 300.0], (
        "a stream that has begun waits longest"
    )
    assert {ask.tenant for ask in script.asks} == {"t"}
    assert script.blamed == []


@pytest.mark.parametrize("produces", [True, False], ids=["produce", "generate"])
def test_request_that_crashes_a_worker_alone_is_not_retried(produces: bool) -> None:  # noqa: FBT001  a parameter
    alone = Act(produce=CrashedAlone("p")) if produces else Act(tokens=0, end=CrashedAlone("d"))
    script = Script(Act(tokens=2, end=WorkerGone("d")), alone, Act())
    with pytest.raises(Poisonous, match="ran nothing else"):
        pieces_of(script, a_request())
    assert len(script.asks) == 2
    assert script.lost_workers == ["d.1", "p.2" if produces else "d.2"]
    assert script.blamed == [content_hash_of(a_request())], (
        "reported to the router, with the original content"
    )
    assert {ask.content_hash for ask in script.asks} == {content_hash_of(a_request())}


def test_worker_that_falls_silent_alone_proves_nothing_and_two_do() -> None:
    """A machine may stand still for some seconds; a request that makes steps hang does it again."""
    silent = Act(tokens=1, end=LostAlone("d"))
    request = a_request()
    script = Script(Act(tokens=2, end=WorkerGone("d")), silent, Act())
    check_answer(pieces_of(script, request), request)
    assert [call.on_trial for kind, call in script.calls if kind == "generate"] == [False, True, True]
    assert script.blamed == []
    script = Script(Act(tokens=2, end=WorkerGone("d")), silent, silent, Act())
    with pytest.raises(Poisonous, match="ran nothing else"):
        pieces_of(script, request)
    assert script.blamed == [content_hash_of(request)]


def test_content_hash_ignores_the_client() -> None:
    request = a_request()
    same = replace(request, request_id="other", sampling=Sampling(seed=9), tenant="t", on_trial=True)
    assert content_hash_of(same) == content_hash_of(request)
    assert len(content_hash_of(request)) == 16
    for other in (
        replace(request, tokens=(*request.tokens, 1)),
        replace(request, sampling=Sampling(temperature=0.5)),
        replace(request, salt="s2"),
        replace(request, stop_token_ids=(3,)),
    ):
        assert content_hash_of(other) != content_hash_of(request)


def test_every_call_has_the_end_of_what_routers_saw_before_as_a_breakpoint() -> None:
    script = Script(Act(tokens=1, end=WorkerGone("w")), Act())
    script.shared_pages = 1
    pieces_of(script, replace(a_request(), breakpoints=(3, 9)))
    assert [kind for kind, _ in script.calls] == ["produce", "generate"] * 2
    assert {sent.breakpoints for _, sent in script.calls} == {(3, P, 9)}


@pytest.mark.parametrize(
    ("breakpoints", "shared_pages", "expected"),
    [
        ((), 0, ()),
        ((), 2, (8,)),
        ((5, 20), 3, (5, 12, 20)),
        ((5, 11), 2, (5, 11)),  # the checkpoint of 11 is the one at 8
        ((1, 2, 3), 1, (1, 2, 3, 4)),
        ((1, 2, 3, 30), 1, (1, 2, 3, 30)),  # those of the client are as many as may be
    ],
)
def test_breakpoints_with_the_shared_end(
    breakpoints: tuple[int, ...], shared_pages: int, expected: tuple[int, ...]
) -> None:
    assert with_shared_end(breakpoints, shared_pages, 4) == expected


def reported(script: Script) -> tuple[list[StreamPiece], list[object]]:
    """Return the answer, and the errors that asyncio reports because they were not retrieved."""
    reports: list[object] = []

    async def main() -> list[StreamPiece]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, report: reports.append(report.get("exception")))
        async with aclosing(generated(partial(serve, a_request(), script, script, root_of, INFO))) as pieces:
            answer = [piece async for piece in pieces]
        gc.collect()  # it reports when the task goes
        return answer

    return run(main()), reports


async def test_decode_worker_fetches_while_the_prefill_worker_produces() -> None:
    script = Hold()
    async with aclosing(generated(partial(serve, a_request(1), script, script, root_of, INFO))) as pieces:
        first = asyncio.ensure_future(anext(pieces))
        await script.begun.wait()
        assert [kind for kind, _ in script.calls] == ["produce"]
        script.let_end.set()
        assert (await first).finish == "length"
    assert [kind for kind, _ in script.calls] == ["produce", "generate"]
    assert script.prefetched == [a_request(1)]
    assert script.prefetching == 0


@pytest.mark.parametrize(
    "prefetch", ["ends", WorkerGone("another life"), PagesMissing("m"), RequestError("r"), OutOfMemory("o")]
)
def test_outcome_of_a_prefetch_changes_nothing(prefetch: Exception | Literal["ends"]) -> None:
    script = Script(Act(prefetch=prefetch, produce_turns=3))
    undisturbed = Script(Act(produce_turns=3))
    pieces, reports = reported(script)
    assert pieces == pieces_of(undisturbed, a_request())
    assert reports == []
    assert (script.asks, script.calls) == (undisturbed.asks, undisturbed.calls)
    assert script.prefetched == undisturbed.prefetched == [a_request()]
    assert script.lost_workers == []


async def test_client_that_hangs_up_while_its_prompt_is_produced_leaves_nothing_running() -> None:
    script = Hold()
    pieces = list[StreamPiece]()
    first = asyncio.create_task(serve(a_request(), script, script, root_of, INFO, pieces.append))
    await script.begun.wait()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    assert script.prefetching == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [kind for kind, _ in script.calls] == ["produce"]


def test_bug_in_a_prefetch_is_reported_and_changes_no_answer() -> None:
    pieces, reports = reported(Script(Act(prefetch=AssertionError("a bug"), produce_turns=3)))
    check_answer(pieces, a_request())
    assert [str(error) for error in reports] == ["a bug"]


def test_what_is_pooled_arrives_once_whatever_is_lost() -> None:
    losses = [
        Act(prefill=False, end=error) for error in (WorkerGone("w"), HandedOver("h"), PagesMissing("m"))
    ]
    script = Script(*losses, Act(prefill=False))
    (piece,) = pieces_of(script, replace(a_request(0), pools=True))
    assert (piece.tokens, piece.finish, piece.pooled) == ((), "stop", b"pool")
    assert piece.trace.attempts == 3
    assert [ask.pools for ask in script.asks] == [True] * 4
    assert [sent.max_new_tokens for _, sent in script.calls] == [0] * 4
