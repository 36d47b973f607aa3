"""Factories of small prefix indexes.

A letter is a page of one token, "aba" a prefix of three pages.
"""

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import Attention, Layout, Linear, PageId, StateId, layout_of
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy, RecomputeCost

PAGE_BYTES, STATE_BYTES = 8, 24


def a_layout(*, hybrid: bool) -> Layout:
    linear = Linear(key_heads=1, value_heads=1, key_dim=1, value_dim=2, conv_width=2)
    attention = Attention(kv_heads=1, head_dim=1)
    layout = layout_of((linear, attention) if hybrid else (attention,), 1)
    assert (layout.page_bytes, layout.state_stride_bytes) == (PAGE_BYTES, STATE_BYTES * hybrid)
    return layout


def an_index(*, hybrid: bool, policy: Policy = "value", cost: RecomputeCost | None = None) -> PrefixIndex:
    return PrefixIndex(a_layout(hybrid=hybrid), policy, cost)


def keys_of(path: str) -> list[PageKey]:
    return [PageKey(path[:end].encode()) for end in range(1, len(path) + 1)]


def insert_path(index: PrefixIndex, path: str, *, checkpoints: str = "") -> list[Entry]:
    """Insert the unpinned pages of `path`, with a checkpoint where `checkpoints` has an x, and a spare
    one where it has an s."""
    entries: list[Entry] = []
    for key in keys_of(path):
        entry, _ = index.insert(entries[-1] if entries else None, key, PageId(len(index)))
        entries.append(entry)
    for entry, mark in zip(entries, checkpoints, strict=False):
        if mark in "xs":
            state = StateId(len(index) * 10 + entry.depth_pages)
            index.keep_checkpoint(entry, Checkpoint((state,)), spare=mark == "s")
    for entry in reversed(entries):
        index.unpin(entry)
    return entries


def evict(index: PrefixIndex) -> str | None:
    """Evict the cheapest leaf and advance the clock by its credit."""
    entry = index.cheapest_leaf()
    if entry is None:
        return None
    index.age(index.credit(entry) if index.is_restorable(entry) else 0.0)
    index.remove(entry)
    index.check()
    return entry.key.decode()


def evict_all(index: PrefixIndex) -> list[str]:
    order: list[str] = []
    while (removed := evict(index)) is not None:
        order.append(removed)
    return order
