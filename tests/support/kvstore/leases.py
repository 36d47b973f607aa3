"""Factories of small ledgers and leases."""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import Namespace, PageKey, page_keys
from tidemill.kvstore.layout import (
    PAGES,
    Attention,
    Linear,
    ObjectClass,
    Window,
    layout_of,
)
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Backing, Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.demand import Demand, FailAllocation, never
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy

P = 2
ROOT = Namespace(model="m", layout="l").root()
TOKENS = list(range(20))
KEYS = page_keys(ROOT, TOKENS, P)


MAPPING = "map"


@dataclass
class Refusals:
    """Refuses the call at `site` after `left` others, or all from then on; also as a backing."""

    site: str = ""
    left: int = 0
    forever: bool = False
    count: int = 0  # of refused calls
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def __call__(self, site: str) -> bool:
        self.left -= site == self.site
        refused = site == self.site and (self.left == -1 or (self.forever and self.left < 0))
        self.count += refused
        return refused

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        del offset_bytes, num_bytes
        if self(MAPPING):
            raise OutOfMemory("refused")

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None: ...

    def unmap(self, offset_bytes: int, num_bytes: int) -> None: ...

    def close(self) -> None: ...


def a_cache(
    num_extents: int,
    states_per_extent: int = 1,
    *,
    page_tokens: int = P,
    hybrid: bool = True,
    window: int = 0,
    policy: Policy = "value",
    backing: Backing | None = None,
    others: Sequence[ObjectClass] = (),
    converts: bool = False,
) -> Cache:
    """A token takes 8 bytes, and 8 more with a `window`; a state takes 24, or as many as two copies of 20 in
    checkpoints.

    With pages of two tokens, an extent has room for two pages, two window pages or one state,
    `states_per_extent` times.
    """
    linear = Linear(key_heads=1, value_heads=1, key_dim=1, value_dim=2, conv_width=2)
    attention = Attention(kv_heads=1, head_dim=1)
    windows = [Window(kv_heads=1, head_dim=1, tokens=window)] if window else []
    layers = (linear, attention, *windows) if hybrid else (attention, *windows)
    state_pages = -(-(5 if converts else 3) // page_tokens)
    extent_bytes = 8 * page_tokens * state_pages * states_per_extent
    dtype = "bfloat16" if converts else "float32"
    layout = layout_of(
        layers, page_tokens, checkpoint_dtype=dtype, extent_bytes_min=extent_bytes, granule_bytes=1
    )
    assert layout.pages_per_extent == state_pages * states_per_extent
    layout = replace(layout, others=tuple(others))
    arena = Arena(layout, num_extents, backing or Fixed(num_extents * layout.extent_bytes))
    return Cache(layout, arena, PrefixIndex(layout, policy))


def a_ledger(
    num_extents: int,
    states_per_extent: int = 1,
    *,
    hybrid: bool = True,
    window: int = 0,
    policy: Policy = "value",
    fail_allocation: FailAllocation = never,
) -> Ledger:
    cache = a_cache(num_extents, states_per_extent, hybrid=hybrid, window=window, policy=policy)
    return Ledger(cache, fail_allocation=fail_allocation)


def could_serve(cache: Cache, leases: Iterable[Lease], demand: Demand) -> bool:
    """Return whether the objects would fit if everything that no lease pins was evicted."""
    pinned = {row.name: set[int]() for row in cache.layout.classes}
    for lease in leases:
        pinned[PAGES] |= set(lease.pages)
        for name, ids in lease.owned().items():
            pinned[name] |= set(ids)
        for checkpoint in (entry.checkpoint for entry in lease.sources() if entry.checkpoint):
            for name, ids in checkpoint.by_class():
                pinned[name] |= set(ids)
    extents = cache.arena.budget_extents
    for row in (row for row in cache.layout.classes if row.bytes):
        used = {taken // row.per_extent for taken in pinned[row.name]}
        lacking = len(pinned[row.name]) + demand.get(row.name, 0) - len(used) * row.per_extent
        extents -= len(used) + max(0, -(-lacking // row.per_extent))
    return extents >= 0


def grow(ledger: Ledger, lease: Lease, num_tokens: int, keys: Sequence[PageKey] = KEYS) -> Lease:
    """Run one step that computes the request up to `num_tokens`."""
    ledger.reserve(lease, num_tokens)
    ledger.launch(lease, num_tokens)
    ledger.commit(lease, num_tokens, keys)
    ledger.check()
    return lease


def snapshot(lease: Lease) -> dict[str, Any]:
    """Return the attributes of a lease, with copies of its collections."""
    values = {field.name: getattr(lease, field.name) for field in fields(lease)}
    collections = (list, dict, deque)
    return {name: copy(value) if type(value) in collections else value for name, value in values.items()}


def scatter(ledger: Ledger, keys: Sequence[PageKey], path_pages: int = 5) -> None:
    """Scatter the first `path_pages` pages of `keys` over as many extents. The checkpoint at their end has
    one more extent."""
    path, other = ledger.open("path"), ledger.open("other")
    for num_pages in range(1, path_pages):
        ledger.reserve(path, num_pages * P)
        ledger.reserve(other, num_pages * P)
    ledger.launch(other, (path_pages - 1) * P)
    ledger.commit(other, (path_pages - 1) * P, page_keys(ROOT, [1] * 20, P))
    ledger.release("other")
    ledger.keep_state(grow(ledger, path, path_pages * P, keys), last=True)
    ledger.release("path")
    assert len({entry.page // 2 for entry in ledger.index.match(keys[:path_pages]).path}) == path_pages
