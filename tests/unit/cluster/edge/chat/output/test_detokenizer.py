"""One answer: however its tokens are cut into pieces, text, count and logprobs are the same."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.edge.chat.output.detokenizer import Answer, Ending, Growth, Scored
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.workers.messages import FinishReason, Request, TokenLogprob
from tidemill.workers.sources.names import bundled

EOS = 1
WORDS = " Emma is in the tower. naïve 日本 in the end"


@cache
def tokenizer() -> FolderTokenizer:
    return load_tokenizer(bundled()["keeper"])


def answer(ending: Ending) -> Answer:
    request = Request(request_id="r", tokens=(5,), max_new_tokens=500, stop_token_ids=(EOS,))
    return Answer(request, tokenizer().decoder(), ending)


def grown(tokens: list[int], sizes: list[int], finish: FinishReason, ending: Ending) -> list[Growth]:
    """The answer in pieces of these sizes, the last size again and again."""
    making, growths, at = answer(ending), list[Growth](), 0
    while not growths or growths[-1].finish is None:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        piece = tokens[at : at + size]
        logprobs = [TokenLogprob(-float(at + place)) for place in range(len(piece))]
        at += size
        growths.append(making.push(piece, logprobs, finish if at >= len(tokens) else None))
    return growths


def whole(growths: list[Growth]) -> tuple[str, int, list[Scored], FinishReason | None, str | int | None]:
    scored = [score for growth in growths for score in growth.scored]
    text = "".join(growth.text for growth in growths)
    num_tokens = sum(growth.num_tokens for growth in growths)
    return text, num_tokens, scored, growths[-1].finish, growths[-1].stop


endings = st.builds(
    Ending,
    stops=st.lists(
        st.sampled_from(["tower", " in the", "Emma is", ".", "日", "本 in", "nowhere"]), max_size=3
    ).map(tuple),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 12),
)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), ending=endings, ends=st.booleans())
def test_any_cut_into_pieces_gives_the_same_answer(sizes: list[int], ending: Ending, *, ends: bool) -> None:
    tokens = tokenizer().encode(WORDS)
    tokens, finish = ([*tokens, EOS], "stop") if ends else (tokens, "length")
    in_pieces = whole(grown(tokens, sizes, finish, ending))
    at_once = whole(grown(tokens, [len(tokens)], finish, ending))
    assert in_pieces == at_once
    text, num_tokens, scored, _, stop = at_once
    assert [score.token for score in scored] == tokens[: len(scored)]
    known = [score.logprob.logprob for score in scored if score.logprob is not None]
    assert known == [-float(place) for place in range(len(scored))]
    pieces = b"".join(tokenizer().piece(score.token) for score in scored)
    shown = pieces.decode(errors="ignore").removesuffix("<|end|>")
    assert shown.startswith(text)  # a stop string may cut the last token
    assert all(score.start < len(text) for score in scored) or not isinstance(stop, str)
    if isinstance(stop, str):
        assert num_tokens > ending.min_tokens
        assert text.endswith(stop) or not ending.include_stop
    else:
        assert text == WORDS
        assert num_tokens == len(tokens)


@settings(deadline=None)
@given(ending=endings)
def test_logprobs_come_with_the_text_that_they_belong_to(ending: Ending) -> None:
    text, shown = "", list[Scored]()
    for growth in grown(tokenizer().encode(WORDS), [1], "length", ending):
        text += growth.text
        shown += growth.scored
        if growth.finish is None:
            assert all(score.start < len(text) for score in shown)
            assert not growth.scored or growth.text


def test_stop_token_is_unseen_unless_it_is_asked_for() -> None:
    dot = tokenizer().encode(".")
    request = Request(request_id="r", tokens=(5,), max_new_tokens=9, stop_token_ids=(dot[0],))
    for include, text in ((False, " Emma"), (True, " Emma.")):
        ending = Ending(include_stop=include, stop_token_ids=(dot[0],))
        growth = Answer(request, tokenizer().decoder(), ending).push(
            [*tokenizer().encode(" Emma"), *dot], (), "stop"
        )
        assert (growth.text, growth.finish, growth.stop) == (text, "stop", dot[0])
        assert growth.num_tokens == len(tokenizer().encode(" Emma")) + 1


def test_stop_string_before_min_tokens_is_text() -> None:
    tokens = tokenizer().encode(" in the tower in the end")
    first = len(tokenizer().encode(" in the"))
    for min_tokens, text in ((first - 1, ""), (first, " in the tower")):
        ending = Ending(stops=(" in the",), min_tokens=min_tokens)
        assert whole(grown(tokens, [1], "length", ending))[0] == text


def test_special_tokens_wait_without_cost_and_are_reported_at_the_end() -> None:
    growths = grown([3] * 1000, [1], "length", Ending())
    assert "".join(growth.text for growth in growths) == ""
    assert len(growths[-1].scored) == 1000
