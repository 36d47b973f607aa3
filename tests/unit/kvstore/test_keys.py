"""Keys depend on every token up to their end and on every field of the namespace."""

from dataclasses import fields, replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tidemill.kvstore.keys import (
    DIGEST_BYTES,
    Kind,
    Namespace,
    ObjectKey,
    PageKey,
    extend_keys,
    page_keys,
)
from tidemill.kvstore.stores.folder_bound import OBJECT_NAME

ROOT = Namespace(model="m", layout="l").root()
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)

texts = st.text(max_size=6)
namespaces = st.builds(Namespace, model=texts, layout=texts, salt=texts)
token_lists = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=40)
page_sizes = st.integers(1, 9)


@PROPERTY
@given(token_lists, page_sizes)
def test_page_keys_has_one_key_per_full_page(tokens: list[int], page_tokens: int) -> None:
    keys = page_keys(ROOT, tokens, page_tokens)
    assert len(keys) == len(tokens) // page_tokens
    assert all(len(key) == DIGEST_BYTES for key in keys)
    assert len({ROOT, *keys}) == len(keys) + 1


@PROPERTY
@given(token_lists, page_sizes, st.data())
def test_page_keys_change_after_an_early_token(
    tokens: list[int], page_tokens: int, data: st.DataObject
) -> None:
    assume(tokens)
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = page_keys(ROOT, tokens, page_tokens), page_keys(ROOT, changed, page_tokens)
    same = [left == right for left, right in zip(before, after, strict=True)]
    assert same == [index < at // page_tokens for index in range(len(before))]


@PROPERTY
@given(token_lists, page_sizes, st.data())
def test_extend_keys_in_steps_equals_page_keys(
    tokens: list[int], page_tokens: int, data: st.DataObject
) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    keys: list[PageKey] = []
    for end in [*ends, len(tokens)]:
        extend_keys(keys, ROOT, tokens[:end], page_tokens)
        assert keys == page_keys(ROOT, tokens[:end], page_tokens)


@PROPERTY
@given(namespaces, namespaces)
@example(Namespace(model="ab", layout="c"), Namespace(model="a", layout="bc"))
@example(Namespace(model="é", layout=""), Namespace(model="", layout="é"))
def test_namespace_separates_keys(left: Namespace, right: Namespace) -> None:
    """The boundary between fields counts: ("ab", "c") differs from ("a", "bc")."""
    assert (left.root() == right.root()) == (left == right)


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_namespace_separates_keys_by_every_field(field: str) -> None:
    one = Namespace(model="model", layout="layout", salt="salt")
    other = replace(one, **{field: "another"})
    assert set(page_keys(one.root(), range(12), 4)).isdisjoint(page_keys(other.root(), range(12), 4))


def test_page_key_is_the_same_in_every_process_and_version() -> None:
    """Stores outlive processes: a change here needs a new LAYOUT_VERSION."""
    assert ROOT.hex() == "414705c7a00cf31db7247add10662581"
    assert page_keys(ROOT, range(4), 2)[-1].hex() == "9150f1de3c2da4ad9534fc02d2b3baa6"


def test_object_keys_of_one_page_key_have_different_names() -> None:
    names = {
        str(ObjectKey(kind, key, shard))
        for kind in Kind
        for key in page_keys(ROOT, range(4), 2)
        for shard in (0, 1, 0xFFFF)
    }
    assert len(names) == 3 * 2 * 3
    assert len({len(name) for name in names}) == 1
    assert all(OBJECT_NAME.fullmatch(name) for name in names), "FolderBound does not count them"
