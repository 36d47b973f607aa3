# ruff: noqa: ANN401 - requests and configurations are those of vLLM
"""The groups of layers of a vLLM, as objects of a store. Pure.

The layers of a group share a table of blocks. A block of a group is one object for each rank: the bytes
of its layers one after another, each `[heads][tokens][K and V]` or a whole state, whatever the strides of
the engine's own memory are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.kvstore.keys import Kind, ObjectKey, PageKey

KINDS = {
    "full_attention": Kind.PAGE,
    "mla_attention": Kind.PAGE,
    "sliding_window": Kind.WINDOW,
    "mamba": Kind.CHECKPOINT,
}
"""The kind of object of each kind of KV cache in vLLM; layers of another kind are refused."""


class Unsupported(ValueError):
    """A vLLM that cannot be served from a store; the message names the reason, and a fix if any."""


class BlockMove(NamedTuple):
    """A block between a vLLM's memory and the store. All numbers are those of the scheduler's vLLM."""

    group: int
    key: PageKey
    block: int


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of one table of blocks. `window` is the tokens that a query of a WINDOW sees."""

    kind: Kind
    window: int = 0

    def needed(self, depth: int, block_tokens: int) -> range:
        """Return the blocks without which nothing continues after the first `depth` ones."""
        match self.kind:
            case Kind.PAGE:
                return range(depth)
            case Kind.CHECKPOINT:
                return range(max(0, depth - 1), depth)
            case Kind.WINDOW:
                return range(max(0, depth * block_tokens - self.window + 1) // block_tokens, depth)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a model whose blocks have `block_tokens` tokens in all of them."""

    groups: tuple[Group, ...]
    block_tokens: int
    ranks: int

    def object_key(self, group: int, key: PageKey, rank: int) -> ObjectKey:
        """Return the key of a block of a group on one rank: groups of one kind are shards of each other."""
        return ObjectKey(self.groups[group].kind, key, rank * len(self.groups) + group)

    def candidates(self, keys: Sequence[PageKey], start: int) -> list[ObjectKey]:
        """Return the objects that `deepest` asks for: those of all blocks beyond the first `start` ones."""
        return [
            self.object_key(group, key, rank)
            for group in range(len(self.groups))
            for key in keys[start:]
            for rank in range(self.ranks)
        ]

    def deepest(self, start: int, end: int, held: Sequence[bool]) -> int:
        """Return the greatest depth in blocks up to `end` that can be restored beyond `start`, else `start`.
        `held` answers for the `candidates` of `end` keys."""
        held_GBR = np.array(held, bool).reshape(len(self.groups), end - start, self.ranks)
        held_GB: NDArray[np.bool_] = np.logical_and.reduce(held_GBR, axis=2)
        is_page_G = [group.kind is Kind.PAGE for group in self.groups]
        pages_B: NDArray[np.bool_] = np.logical_and.reduce(held_GB[is_page_G], axis=0)
        reached = start + int(np.logical_and.accumulate(pages_B).sum())
        others = [(each, held_GB[row]) for row, each in enumerate(self.groups) if each.kind is not Kind.PAGE]
        for depth in range(reached, start, -1):
            needed = [(group.needed(depth, self.block_tokens), held_B) for group, held_B in others]
            if all(held_B[max(0, run.start - start) : run.stop - start].all() for run, held_B in needed):
                return depth
        return start


def groups_of(cache_config: Any, vllm_config: Any, kind_of: Callable[[Any], str]) -> Groups:
    """Return the groups of a KVCacheConfig; `kind_of` gives the name of a spec's kind. Raises Unsupported."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    specs = [group.kv_cache_spec for group in cache_config.kv_cache_groups]
    kinds = [kind_of(spec) for spec in specs]
    if unknown := sorted({*kinds} - {*KINDS}):
        raise Unsupported(f"layers of the kind {', '.join(unknown)} are not stored")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise Unsupported("context parallel ranks share blocks: leave out the context parallel sizes")
    if any(group.is_eagle_group for group in cache_config.kv_cache_groups):
        raise Unsupported("draft layers have a KV cache of their own: leave out --speculative-config")
    if "mamba" in kinds and cache.mamba_cache_mode != "align":
        raise Unsupported(
            f"states are stored at the ends of blocks, which mamba cache mode {cache.mamba_cache_mode} does "
            "not keep: start vLLM with --enable-prefix-caching --mamba-cache-mode align"
        )
    if len(sizes := {spec.block_size for spec in specs}) != 1:
        raise Unsupported(f"its groups have blocks of {sorted(sizes)} tokens, not of one size")
    windows = [getattr(spec, "sliding_window", None) or 0 for spec in specs]
    groups = tuple(Group(KINDS[kind], window) for kind, window in zip(kinds, windows, strict=True))
    return Groups(groups, sizes.pop(), parallel.world_size)
