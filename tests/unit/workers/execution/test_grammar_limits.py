"""The limits of grammars: time to compile, time of masks, memory of lexers."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from random import Random
from threading import Event
from time import monotonic

import numpy as np
import numpy.typing as npt
import pytest
import torch
from llguidance import LLTokenizer

from tests.support.workers.drawing import draw, request_of, row_of
from tests.support.workers.masks import allowed
from tidemill.workers.execution import grammar as module
from tidemill.workers.execution import sampler
from tidemill.workers.execution.grammar import Grammars, LexerMemory, Mask, Matcher
from tidemill.workers.execution.grammar_library import LibraryMatcher, compile_grammar
from tidemill.workers.execution.mask_pool import MaskPool
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Drawn
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError, Sampling
from tidemill.workers.sources.names import bundled

FOLDER = bundled()["keeper"]
VOCABULARY, EOS = 896, 1
ENDLESS = Grammar(
    kind="json_schema",
    text=json.dumps(
        {"type": "string", "allOf": [{"pattern": f".*{letter}.{{20}}$"} for letter in "abcdefghijklmnopqrst"]}
    ),
)
PRIMES = Grammar(
    kind="json_schema",
    text=json.dumps({"allOf": [{"type": "integer", "multipleOf": of} for of in (7919, 7907, 7901, 7883)]}),
)
LETTERS = Grammar(kind="regex", text="[a-z]{1,50}")


def grammars() -> Grammars:
    return Grammars(FOLDER, VOCABULARY, (EOS,))


shared = cache(grammars)


def walk(matcher: Matcher, steps: int, seed: int = 1) -> list[npt.NDArray[np.bool_]]:
    """The masks along a random answer."""
    rng, masks = Random(seed), list[npt.NDArray[np.bool_]]()
    for _ in range(steps):
        masks.append(allowed(matcher))
        assert masks[-1].any()
        matcher.push(int(rng.choice([token for token in np.flatnonzero(masks[-1]) if token != EOS] or [EOS])))
    return masks


def test_grammar_that_compiles_for_minutes_is_refused_and_others_go_on() -> None:
    limited = grammars()
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError, match="more than 1 s or 1 GiB to compile"):
            limited.matcher(ENDLESS)
    assert allowed(limited.matcher(LETTERS)).any()
    limited.close()


def test_answers_of_one_grammar_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []

    def counting(tokenizer: LLTokenizer, grammar: Grammar, lexer_states: int) -> LibraryMatcher:
        compiled.append(grammar)
        return compile_grammar(tokenizer, grammar, lexer_states)

    monkeypatch.setattr(module, "compile_grammar", counting)
    limited = grammars()
    walks = [walk(limited.matcher(LETTERS), 5, seed) for seed in (1, 2, 1)]
    assert compiled == [LETTERS]
    assert all((mask == other).all() for mask, other in zip(walks[0], walks[2], strict=True))


def test_old_grammars_leave_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_MAX", 2)
    limited = grammars()
    for text in ("a", "b", "a", "c"):
        limited.matcher(Grammar(kind="regex", text=text))
    assert [grammar.text for grammar in limited._compiled] == ["a", "c"]


def test_masks_do_not_depend_on_the_states_that_a_lexer_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = walk(grammars().matcher(PRIMES), 60)
    monkeypatch.setattr(module, "LEXER_STATES", (40, 160, 8000))
    narrow = grammars().matcher(PRIMES)
    assert all((mask == other).all() for mask, other in zip(walk(narrow, 60), wide, strict=True))
    assert narrow._share.states == 8000


def test_answer_that_moved_continues_where_replaying_its_tokens_takes_much_fuel() -> None:
    straight, known = grammars().matcher(PRIMES), list[int]()
    for step in range(60):
        token = int(
            Random(step).choice([token for token in np.flatnonzero(allowed(straight)) if token != EOS])
        )
        straight.push(token)
        known.append(token)
    moved = grammars().matcher(PRIMES)
    for token in known:
        moved.push(token)
    assert (allowed(moved) == allowed(straight)).all()
    assert allowed(moved).sum() > 1


def test_lexer_that_needs_more_than_the_last_limit_ends_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEXER_STATES", (40, 80))
    with pytest.raises(RequestError, match="needs more than 80 states of its lexer after") as caught:
        walk(grammars().matcher(PRIMES), 60)
    assert caught.value.code == "grammar_too_complex"


def test_lexers_of_all_answers_share_a_limit() -> None:
    memory = LexerMemory(1000)

    def matcher() -> Matcher:
        return Matcher(lambda _: pytest.fail("nothing is compiled yet"), VOCABULARY, (EOS,), None, memory)

    first, second = matcher(), matcher()
    with pytest.raises(RequestError, match="retry later") as caught:
        matcher()
    assert caught.value.status == 429
    second.close()
    second.close()
    third = matcher()
    with pytest.raises(RequestError, match="retry later"):
        matcher()
    del first  # without close: a request that ended before it ran
    fourth = matcher()
    assert fourth is not third


def test_answer_whose_masks_cost_too_much_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S_MAX", 0.0)
    monkeypatch.setattr(module, "TOKEN_S_MAX", 1e-9)
    with pytest.raises(RequestError, match="to follow this grammar takes too long") as caught:
        walk(grammars().matcher(LETTERS), 10)
    assert caught.value.code == "grammar_too_slow"


class Held(MaskPool[Mask]):
    """Computes no mask before `release`, and raises `error` for it if there is one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.release = Event()
        self.error: RequestError | None = None

    def submit(self, compute: Callable[[], Mask], spent_s: float, *, quick: bool) -> Future[Mask]:
        def held() -> Mask:
            self.release.wait()
            if self.error is not None:
                raise self.error
            return compute()

        return super().submit(held, spent_s, quick=quick)


def state_with(pool: MaskPool[Mask] | None, grammar: Grammar | None = LETTERS) -> SamplingState:
    request = request_of(Sampling(temperature=0))
    if grammar is None:
        return SamplingState(request)
    of_pool = grammars()
    if pool is not None:
        of_pool._pool = pool
    return SamplingState(request, of_pool.matcher(grammar))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no mask be late because the machine is busy."""
    monkeypatch.setattr(sampler, "MASKS_S_MAX", 60.0)


def test_row_whose_mask_is_late_draws_nothing_and_others_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MASKS_S_MAX", 0.01)
    exception, waits_s = Future[Mask].exception, list[float]()

    def recorded(future: Future[Mask], timeout: float | None = None) -> BaseException | None:
        waits_s.append(timeout or 0.0)
        return exception(future, timeout)

    monkeypatch.setattr(Future, "exception", recorded)
    pool, logits_NV = Held(), torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    states = [state_with(None), state_with(pool), state_with(None, None)]
    drawn = draw(logits_NV, list(map(row_of, states)))
    assert [row_drawn.late for row_drawn in drawn] == [False, True, False]
    assert [len(row_drawn.tokens) for row_drawn in drawn] == [1, 0, 1]
    assert max(waits_s) <= sampler.MASKS_S_MAX
    matcher = states[1].matcher
    assert matcher is not None
    assert not matcher.may_launch(in_flight=False)
    pool.release.set()
    assert matcher.ready_by(monotonic() + 60)
    assert matcher.may_launch(in_flight=False)
    assert not matcher.may_launch(in_flight=True)
    (again,) = draw(logits_NV[:1], [row_of(states[1])])
    assert again == drawn[0]  # the same grammar and logits


def test_draft_whose_mask_is_late_stays_unconfirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, logits_NV = Held(), torch.zeros(3, VOCABULARY)
    pool.release.set()
    logits_NV[:, 70] = 9.0
    (truth,) = draw(logits_NV, [row_of(state_with(pool), (70, 70))])
    assert len(truth.tokens) == 3
    state = state_with(pool)
    assert state.matcher is not None
    state.matcher.mask()
    pool.release.clear()
    monkeypatch.setattr(sampler, "MASKS_S_MAX", 0.01)
    (drawn,) = draw(logits_NV, [row_of(state, (70, 70))])
    assert drawn == Drawn(truth.tokens[:1])
    pool.release.set()


def test_error_of_a_mask_ends_its_row_alone() -> None:
    pool, logits_NV = Held(), torch.zeros(2, VOCABULARY)
    pool.error = RequestError("too slow")
    pool.release.set()
    failed, fine = draw(logits_NV, [row_of(state_with(pool)), row_of(state_with(None))])
    assert failed.error is pool.error
    assert len(fine.tokens) == 1


def test_cheapest_answer_is_next() -> None:
    """A quick mask waits for none that is slow."""
    pool, order, began, release = MaskPool[None](1), list[str](), Event(), Event()

    def first() -> None:
        began.set()
        release.wait()

    futures = [pool.submit(first, 0.0, quick=False)]
    began.wait()
    for name, spent_s in (("dear", 3.0), ("cheap", 1.0), ("dearest", 9.0)):
        futures.append(pool.submit(lambda name=name: order.append(name), spent_s, quick=False))
    pool.submit(lambda: order.append("quick"), 99.0, quick=True).result()
    release.set()
    for future in futures:
        future.result()
    assert order == ["quick", "cheap", "dear", "dearest"]


def chain(length: int) -> str:
    """Twice as many ways in each link as in the one before."""
    links: dict[str, object] = {
        f"d{at}": {"properties": {name: {"$ref": f"#/$defs/d{at + 1}"} for name in "ab"}}
        for at in range(length)
    }
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def objects(many: str, count: int) -> str:
    return json.dumps({many: [{"properties": {f"k{at}": {"type": "string"}}} for at in range(count)]})


BOMBS: dict[str, Callable[[], Grammar]] = {
    "nested plus": lambda: Grammar(kind="regex", text="(a+)+b"),
    "ambiguous": lambda: Grammar(kind="regex", text="((a|a)|(a|a))*" * 20 + "b"),
    "counted thrice": lambda: Grammar(kind="regex", text="((a{1,1000}){1,1000}){1,1000}"),
    "counted tails": lambda: Grammar(kind="regex", text="(.*a.{200}){50}"),
    "parentheses": lambda: Grammar(kind="regex", text="(" * 20_000 + "a" + ")" * 20_000),
    "maybe": lambda: Grammar(kind="regex", text="a?" * 1000 + "a" * 1000),
    "words": lambda: Grammar(kind="regex", text=r"(\w{1,200}\s){1,200}"),
    "chain": lambda: Grammar(kind="json_schema", text=chain(300)),
    "itself": lambda: Grammar(kind="json_schema", text='{"$ref": "#"}'),
    "many values": lambda: Grammar(kind="json_schema", text=json.dumps({"enum": list(range(8000))})),
    "any of many": lambda: Grammar(kind="json_schema", text=objects("anyOf", 200)),
    "all of many": lambda: Grammar(kind="json_schema", text=objects("allOf", 800)),
    "pattern": lambda: Grammar(kind="json_schema", text='{"type": "string", "pattern": "^((a|aa)+)+$"}'),
    "empty loops": lambda: Grammar(kind="lark", text='start: a*\na: b*\nb: c*\nc: "x"?'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_grammar_made_to_explode_is_refused_or_followed_within_the_limits(name: str) -> None:
    bomb = BOMBS[name]()
    assert len(bomb.text.encode()) <= GRAMMAR_BYTES_MAX
    with suppress(RequestError):
        walk(shared().matcher(bomb), 40)
