"""The text of an answer: however its tokens are cut into pieces, text, count, logprobs and stop strings are
the same."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteFallback, Fuse, Metaspace, Sequence
from tokenizers.models import BPE

from tidemill.cluster.edge.chat.output.detokenizer import Answer, Ending, Growth, Scored
from tidemill.cluster.edge.chat.text import StopScanner
from tidemill.cluster.edge.chat.tokenizer import PENDING_TOKENS_MAX, FolderTokenizer, byte_alphabet
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


KEEPER = bundled()["keeper"]
SMALL = st.text(alphabet="ab☃", max_size=30)
STOPS = st.lists(st.text(alphabet="ab☃", min_size=1, max_size=5), max_size=4)


@cache
def raw() -> RawTokenizer:
    return RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))


def cut_at_stop(
    text: str, stops: list[str], safe: int = 0, *, include: bool = False
) -> tuple[str, str | None]:
    """The definition: text ends at the stop string that ends first behind the `safe` characters, the longest
    of those that end there."""
    for end in range(safe + 1, len(text) + 1):
        found = sorted((stop for stop in stops if text[:end].endswith(stop)), key=len)
        if found:
            return text[: end if include else end - len(found[-1])], found[-1]
    return text, None


def scan(
    pieces: list[str], stops: list[str], quiet: int = 0, *, include: bool = False
) -> tuple[list[str], str | None]:
    """Text that ends in the first `quiet` pieces may not stop."""
    scanner = StopScanner(stops, include=include)
    shown: list[str] = []
    for place, piece in enumerate(pieces):
        shown.append(scanner.push(piece, may_stop=place >= quiet))
        if scanner.stop is not None:
            return shown, scanner.stop
    return [*shown, scanner.end()], None


@given(pieces=st.lists(SMALL, max_size=12), stops=STOPS, quiet=st.integers(0, 4), include=st.booleans())
def test_pieces_of_a_text_give_the_same_as_the_whole(
    pieces: list[str], stops: list[str], quiet: int, *, include: bool
) -> None:
    shown, stop = scan(pieces, stops, quiet, include=include)
    safe = len("".join(pieces[:quiet]))
    assert ("".join(shown), stop) == cut_at_stop("".join(pieces), stops, safe, include=include)


@given(text=SMALL, stops=STOPS)
def test_text_that_cannot_become_a_stop_string_is_not_held_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = scanner.push(text)
    if scanner.stop is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def decode(tokens: list[int]) -> str:
    decoder = FolderTokenizer(raw(), None).decoder()
    return "".join(decoder.push(token) for token in tokens)


@given(text=st.text(max_size=40) | st.text(alphabet="é日🙂a ", max_size=20))
def test_streamed_text_is_the_text_that_was_encoded(text: str) -> None:
    """No part of a character is ever emitted."""
    decoder = FolderTokenizer(raw(), None).decoder()
    tokens = raw().encode(text, add_special_tokens=False).ids
    pushed = [decoder.push(token) for token in tokens]
    whole = raw().decode(tokens, skip_special_tokens=True)
    if not whole.endswith("\ufffd"):
        assert "".join(pushed) == whole
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pushed)


@settings(max_examples=50)
@given(tokens=st.lists(st.integers(0, 1000), max_size=60))
def test_any_tokens_decode_to_valid_text(tokens: list[int]) -> None:
    decode(tokens).encode()


def test_tokens_without_text_do_not_pile_up() -> None:
    first_byte_of_three = raw().encode("日", add_special_tokens=False).ids[0]
    text = decode([first_byte_of_three] * (2 * PENDING_TOKENS_MAX))
    assert text == "\ufffd" * (2 * PENDING_TOKENS_MAX)
    assert decode([1] * 50 + raw().encode(" tea", add_special_tokens=False).ids) == " tea"


@given(text=st.text(max_size=40))
def test_pieces_of_a_text_are_its_bytes(text: str) -> None:
    tokenizer = FolderTokenizer(raw(), None)
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text))) == text.encode()


def test_pieces_of_special_and_unknown_tokens() -> None:
    tokenizer = FolderTokenizer(raw(), None)
    assert tokenizer.piece(1) == b"<|end|>"
    assert tokenizer.piece(10_000) == b""
    assert len(byte_alphabet()) == len(set(byte_alphabet().values())) == 256


def test_pieces_of_a_vocabulary_with_byte_fallback() -> None:
    vocabulary = {"<unk>": 0, "\u2581tea": 1, "<0xE6>": 2, "pot": 3}
    other = RawTokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))  # noqa: S106 - no password
    other.decoder = Sequence([ByteFallback(), Fuse(), Metaspace()])
    tokenizer = FolderTokenizer(other, None)
    assert [tokenizer.piece(token) for token in range(1, 4)] == [b" tea", b"\xe6", b"pot"]
