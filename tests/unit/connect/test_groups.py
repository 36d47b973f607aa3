"""The groups of a vLLM: which blocks a depth needs, how deep a store reaches, and what is refused."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.connect.groups import Group, Groups, Unsupported, groups_of
from tidemill.kvstore.keys import Kind, PageKey

BLOCK_TOKENS = 4
KEYS = [PageKey(bytes([index] * 16)) for index in range(9)]
FULL, STATE, WINDOW = Group(Kind.PAGE), Group(Kind.CHECKPOINT), Group(Kind.WINDOW, window=6)


@pytest.mark.parametrize(
    ("group", "depth", "needed"),
    [
        (FULL, 3, [0, 1, 2]),
        (STATE, 3, [2]),
        (STATE, 0, []),
        (WINDOW, 1, [0]),
        (WINDOW, 3, [1, 2]),  # the query at 12 sees the tokens 7 to 12
        (Group(Kind.WINDOW, window=5), 3, [2]),
        (Group(Kind.WINDOW, window=1), 3, []),
    ],
)
def test_blocks_that_a_depth_needs(group: Group, depth: int, needed: list[int]) -> None:
    assert list(group.needed(depth, BLOCK_TOKENS)) == needed


@given(
    st.lists(st.sampled_from([FULL, STATE, WINDOW]), min_size=1, max_size=4),
    st.integers(1, 2),
    st.integers(0, 8),
    st.data(),
)
def test_the_deepest_depth_has_all_that_it_needs(
    kinds: Sequence[Group], ranks: int, start: int, data: st.DataObject
) -> None:
    groups = Groups((FULL, *kinds), BLOCK_TOKENS, ranks)
    asked = groups.candidates(KEYS, start)
    held = data.draw(st.lists(st.booleans(), min_size=len(asked), max_size=len(asked)))
    there = {key for key, is_held in zip(asked, held, strict=True) if is_held}

    def restorable(depth: int) -> bool:
        return there.issuperset(
            groups.object_key(number, KEYS[index], rank)
            for number, group in enumerate(groups.groups)
            for index in group.needed(depth, BLOCK_TOKENS)
            if index >= start
            for rank in range(ranks)
        )

    whole = [depth for depth in range(start + 1, len(KEYS) + 1) if restorable(depth)]
    assert groups.deepest(start, len(KEYS), held) == max(whole, default=start)


def test_groups_and_ranks_have_objects_of_their_own() -> None:
    groups = Groups((FULL, STATE, STATE, WINDOW), BLOCK_TOKENS, ranks=2)
    assert len(set(groups.candidates(KEYS, 0))) == 4 * 2 * len(KEYS)


def cache_config(*specs: SimpleNamespace, is_eagle_group: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, is_eagle_group=is_eagle_group) for spec in specs]
    )


def vllm_config(mamba_cache_mode: str = "align", **parallel: int) -> SimpleNamespace:
    sizes = {"world_size": 2, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        cache_config=SimpleNamespace(mamba_cache_mode=mamba_cache_mode),
    )


def spec(kind: str, block_size: int = 16, sliding_window: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, block_size=block_size, sliding_window=sliding_window)


def found(cache: SimpleNamespace, config: SimpleNamespace) -> Groups:
    return groups_of(cache, config, lambda each: each.kind)


def test_groups_of_a_hybrid_with_windows() -> None:
    specs = spec("full_attention"), spec("mamba"), spec("sliding_window", sliding_window=128)
    expected = (FULL, STATE, Group(Kind.WINDOW, window=128))
    assert found(cache_config(*specs), vllm_config()) == Groups(expected, 16, ranks=2)


@pytest.mark.parametrize(
    ("cache", "config", "reason"),
    [
        (cache_config(spec("chunked_local_attention")), vllm_config(), "chunked_local_attention"),
        (cache_config(spec("mamba")), vllm_config("none"), "--mamba-cache-mode align"),
        (cache_config(spec("mamba")), vllm_config("all"), "mamba cache mode all"),
        (cache_config(spec("full_attention"), spec("mamba", 32)), vllm_config(), r"\[16, 32\]"),
        (cache_config(spec("full_attention"), is_eagle_group=True), vllm_config(), "--speculative-config"),
        (
            cache_config(spec("full_attention")),
            vllm_config(decode_context_parallel_size=2),
            "context parallel",
        ),
    ],
)
def test_what_is_refused_is_named(cache: SimpleNamespace, config: SimpleNamespace, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        found(cache, config)
