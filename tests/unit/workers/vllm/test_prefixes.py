"""KV events of vLLM become depths under the names of our edges. The definition is counted out beside them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tidemill.kvstore.keys import Namespace, page_keys
from tidemill.workers.messages import ANNOUNCED_KEY_BYTES
from tidemill.workers.vllm.prefixes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Prefixes,
)

P = 4
PAGES, STATES, WINDOWS = "full_attention", "mamba", "sliding_window"


def new_prefixes(*, keeps_states: bool = False) -> Prefixes:
    return Prefixes("model", "vllm/4", P, keeps_states=keeps_states)


def keys_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    root = Namespace(model="model", layout="vllm/4", salt=salt).root()
    return [key[:ANNOUNCED_KEY_BYTES] for key in page_keys(root, tokens, P)]


def name_of(tokens: Sequence[int]) -> bytes:
    return repr(tuple(tokens)).encode()


def stored(
    tokens: Sequence[int],
    start: int = 0,
    *,
    group: int = 0,
    kind: str = PAGES,
    salt: str = "",
    last: bool = False,
) -> BlockStored:
    """Return the event about the blocks of `tokens` from `start` on, or about the last one of them."""
    ends = range(start + P, len(tokens) + 1, P)
    return BlockStored(
        block_hashes=[name_of(tokens[:end]) for end in (ends[-1:] if last else ends)],
        parent_block_hash=name_of(tokens[:start]) if start else None,
        token_ids=list(tokens[start:]),
        block_size=P,
        extra_keys=[[salt]] if salt and not start else None,
        group_idx=group,
        kv_cache_spec_kind=kind,
    )


def removed(tokens: Sequence[int], group: int = 0) -> BlockRemoved:
    return BlockRemoved(block_hashes=[name_of(tokens)], group_idx=group)


def apply(prefixes: Prefixes, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
    prefixes.apply(EventBatch(ts=0.0, events=list(events)))


TOKENS = list(range(1, 13))


def test_blocks_are_announced_by_our_keys_and_taken_back() -> None:
    prefixes = new_prefixes()
    apply(prefixes, stored(TOKENS[:8]), stored(TOKENS, 8))
    assert set(prefixes.take(full=False).added) == set(keys_of(TOKENS))
    assert prefixes.restorable(keys_of(TOKENS)) == 12
    apply(prefixes, removed(TOKENS))
    assert prefixes.take(full=False).removed == (keys_of(TOKENS)[2],)
    assert set(prefixes.take(full=True).added) == set(keys_of(TOKENS)[:2])
    apply(prefixes, AllBlocksCleared())
    assert set(prefixes.take(full=False).removed) == set(keys_of(TOKENS)[:2])
    assert not prefixes.announced
    assert not len(prefixes)


def test_a_block_that_comes_back_before_a_heartbeat_is_no_change() -> None:
    prefixes = new_prefixes()
    apply(prefixes, stored(TOKENS))
    prefixes.take(full=False)
    apply(prefixes, removed(TOKENS), stored(TOKENS, 8))
    changes = prefixes.take(full=False)
    assert (changes.added, changes.removed) == ((), ())


def test_salts_name_other_prefixes() -> None:
    prefixes = new_prefixes()
    apply(prefixes, stored(TOKENS, salt="tenant"))
    assert prefixes.restorable(keys_of(TOKENS, "tenant")) == 12
    assert prefixes.restorable(keys_of(TOKENS)) == 0


def test_blocks_larger_and_smaller_than_a_page() -> None:
    prefixes = new_prefixes()
    large = BlockStored([b"large"], None, TOKENS[:8], 8)
    small = BlockStored([b"small"], b"large", TOKENS[8:10], 2)
    apply(prefixes, large, small)
    assert prefixes.restorable(keys_of(TOKENS)) == 8


def test_a_hybrid_needs_the_state_at_the_end() -> None:
    """An event of states has one hash, of the last block, for a span of tokens. It may come first."""
    prefixes = new_prefixes(keeps_states=True)
    apply(prefixes, stored(TOKENS))
    assert not prefixes.announced
    apply(prefixes, stored(TOKENS, group=1, kind=STATES, last=True))
    assert prefixes.announced == {keys_of(TOKENS)[2]}
    apply(prefixes, removed(TOKENS, group=1))
    assert not prefixes.announced
    first = new_prefixes(keeps_states=True)
    apply(first, stored(TOKENS, group=0, kind=STATES, last=True), stored(TOKENS, group=1))
    assert first.announced == {keys_of(TOKENS)[2]}
    apply(first, removed(TOKENS[:4], group=1))
    assert not first.announced, "a page before the state is gone"


def test_blocks_behind_an_unknown_one_have_no_name() -> None:
    prefixes = new_prefixes()
    apply(prefixes, stored(TOKENS, 8))
    assert not prefixes.announced
    apply(prefixes, stored(TOKENS))
    assert prefixes.restorable(keys_of(TOKENS)) == 12


PROMPTS = ([1] * 16, [1] * 8 + [2] * 8, [3] * 12)
GROUPS = ((0, PAGES), (1, STATES), (2, WINDOWS))

Step = tuple[bool, tuple[int, str], list[int], int]
"""A change: a group, by its number and kind, stores the pages of a prompt up to one, or removes that one."""

steps = st.tuples(st.booleans(), st.sampled_from(GROUPS), st.sampled_from(PROMPTS), st.integers(1, 4))


@given(st.lists(st.lists(steps, max_size=4), max_size=12), st.integers(1, 3))
def test_announced_is_what_can_be_restored(batches: list[list[Step]], num_groups: int) -> None:
    prefixes, held = new_prefixes(), {group: set[bytes]() for group, _ in GROUPS[:num_groups]}
    announced = set[bytes]()
    seen = set[int]()
    for batch in batches:
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        for stores, (group, kind), prompt, num_pages in batch:
            if group >= num_groups:
                continue
            tokens = prompt[: num_pages * P]
            if stores:
                events.append(stored(tokens, group=group, kind=kind))
                held[group] |= {name_of(tokens[:end]) for end in range(P, len(tokens) + 1, P)}
                seen.add(group)
            else:
                events.append(removed(tokens, group))
                held[group].discard(name_of(tokens))
        prefixes.apply(EventBatch(0.0, events))
        expected = {
            keys_of(prompt[:end])[-1]
            for prompt in PROMPTS
            for end in range(P, len(prompt) + 1, P)
            if seen
            and all(name_of(prompt[:end]) in held[group] for group in seen)
            and (0 not in seen or all(name_of(prompt[:before]) in held[0] for before in range(P, end + 1, P)))
        }
        assert prefixes.announced == expected
        changes = prefixes.take(full=False)
        announced = (announced - set(changes.removed)) | set(changes.added)
        assert announced == expected
    assert len(prefixes) >= len(prefixes.announced)


def test_nothing_is_kept_of_what_no_group_holds() -> None:
    prefixes = new_prefixes()
    apply(prefixes, stored(TOKENS), stored([9] * 8))
    apply(prefixes, *(removed(TOKENS[:end]) for end in (4, 8, 12)))
    assert len(prefixes) == 2
