"""Stop strings and incremental decoding: however the text is cut into pieces, clients see the same."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from tests.unit.cluster.fake_service import KEEPER
from tidemill.cluster.http.text import Message, StopScanner
from tidemill.cluster.http.tokenizer import PENDING_TOKENS_MAX, FolderTokenizer, load_tokenizer
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError

SMALL = st.text(alphabet="ab☃", max_size=30)
STOPS = st.lists(st.text(alphabet="ab☃", min_size=1, max_size=5), max_size=4)


@cache
def raw() -> RawTokenizer:
    return RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: text ends at the stop string that ends first, the longest of those that end there."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def scan(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    shown: list[str] = []
    for piece in pieces:
        shown.append(scanner.push(piece))
        if scanner.stopped:
            return shown, True
    return [*shown, scanner.end()], False


@given(pieces=st.lists(SMALL, max_size=12), stops=STOPS)
def test_any_cut_of_the_text_gives_what_searching_the_whole_gives(
    pieces: list[str], stops: list[str]
) -> None:
    shown, stopped = scan(pieces, stops)
    assert ("".join(shown), stopped) == cut_at_stop("".join(pieces), stops)


@given(text=SMALL, stops=STOPS)
def test_text_that_cannot_become_a_stop_string_is_not_held_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = scanner.push(text)
    if not scanner.stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_of_overlapping_stop_strings_the_one_that_ends_first_counts() -> None:
    assert scan(["xab", "cd"], ["abcd", "bc"]) == (["x", "a"], True)
    assert scan(["xabc"], ["bc", "abc"]) == (["x"], True)


def decode(tokens: list[int]) -> str:
    decoder = FolderTokenizer(raw(), None).decoder()
    return "".join(decoder.push(token) for token in tokens)


@given(text=st.text(max_size=40))
def test_streamed_text_is_the_text_that_was_encoded(text: str) -> None:
    tokens = raw().encode(text, add_special_tokens=False).ids
    complete = not raw().decode(tokens, skip_special_tokens=True).endswith("\ufffd")
    if complete:
        assert decode(tokens) == raw().decode(tokens, skip_special_tokens=True)


@given(text=st.text(alphabet="é日🙂a ", min_size=1, max_size=20))
def test_no_part_of_a_character_is_ever_emitted(text: str) -> None:
    decoder = FolderTokenizer(raw(), None).decoder()
    for token in raw().encode(text, add_special_tokens=False).ids:
        assert "\ufffd" not in decoder.push(token)


@settings(max_examples=50)
@given(tokens=st.lists(st.integers(0, 1000), max_size=60))
def test_any_tokens_decode_to_valid_text(tokens: list[int]) -> None:
    decode(tokens).encode()


def test_tokens_without_text_do_not_pile_up() -> None:
    first_byte_of_three = raw().encode("日", add_special_tokens=False).ids[0]
    text = decode([first_byte_of_three] * (2 * PENDING_TOKENS_MAX))
    assert text == "\ufffd" * (2 * PENDING_TOKENS_MAX)
    assert decode([1] * 50 + raw().encode(" tea", add_special_tokens=False).ids) == " tea"


def test_a_chat_is_rendered_by_the_models_template_and_ends_where_the_answer_starts() -> None:
    tokenizer = load_tokenizer(KEEPER)
    tokens = tokenizer.chat([Message("user", "Where is Emma?")])
    assert raw().decode(tokens, skip_special_tokens=False) == "<|user|> Where is Emma?<|end|>\n<|assistant|>"
    assert tokenizer.encode("Emma") == raw().encode("Emma").ids


def test_a_template_that_refuses_is_the_users_error() -> None:
    def refuse(_: object) -> str:
        raise ValueError("roles must alternate")

    with pytest.raises(RequestError, match="roles must alternate"):
        FolderTokenizer(raw(), refuse).chat([Message("user", "a")])
    with pytest.raises(RequestError, match="no chat template"):
        FolderTokenizer(raw(), None).chat([Message("user", "a")])


def test_a_folder_without_a_tokenizer_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("empty")
    with pytest.raises(TidemillError, match=folder.name):
        load_tokenizer(folder)
