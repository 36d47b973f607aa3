"""Stop strings and incremental decoding: however the text is cut into pieces, clients see the same."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteFallback, Fuse, Metaspace, Sequence
from tokenizers.models import BPE

from tidemill.cluster.edge.chat.text import StopScanner
from tidemill.cluster.edge.chat.tokenizer import PENDING_TOKENS_MAX, FolderTokenizer, byte_alphabet
from tidemill.workers.sources.names import bundled

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
