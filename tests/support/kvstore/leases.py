"""Small ledgers and leases, and a memory that is cut to pieces."""

from collections.abc import Callable, Iterable, Sequence

from tidemill.kvstore.keys import Namespace, PageKey, page_keys
from tidemill.kvstore.layout import Attention, Linear, PageId, StateId, Window, WindowId, layout_of
from tidemill.kvstore.memory.allocation_sites import AllocationSite, never
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Backing, Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy

P = 2
ROOT = Namespace(model="m", layout="l").root()
TOKENS = list(range(20))
KEYS = page_keys(ROOT, TOKENS, P)


def a_cache(
    num_extents: int,
    states_per_extent: int = 1,
    *,
    page_tokens: int = P,
    hybrid: bool = True,
    window: int = 0,
    policy: Policy = "value",
    backing: Backing | None = None,
) -> Cache:
    """8 bytes per token, and again in a `window`; 24 per state. With pages of two tokens an extent holds two
    pages or window pages, or one state, `states_per_extent` times."""
    linear = Linear(key_heads=1, value_heads=1, key_dim=1, value_dim=2, conv_width=2)
    attention = Attention(kv_heads=1, head_dim=1)
    windows = [Window(kv_heads=1, head_dim=1, tokens=window)] if window else []
    layers = (linear, attention, *windows) if hybrid else (attention, *windows)
    state_pages = -(-3 // page_tokens)
    extent_bytes = 8 * page_tokens * state_pages * states_per_extent
    layout = layout_of(layers, page_tokens, extent_bytes_min=extent_bytes, granule_bytes=1)
    assert layout.pages_per_extent == state_pages * states_per_extent
    arena = Arena(layout, num_extents, backing or Fixed(num_extents * layout.extent_bytes))
    return Cache(layout, arena, PrefixIndex(layout, policy))


def a_ledger(
    num_extents: int,
    states_per_extent: int = 1,
    *,
    hybrid: bool = True,
    window: int = 0,
    policy: Policy = "value",
    refuses: Callable[[AllocationSite], bool] = never,
) -> Ledger:
    cache = a_cache(num_extents, states_per_extent, hybrid=hybrid, window=window, policy=policy)
    return Ledger(cache, fail_allocation=refuses)


def could_serve(
    cache: Cache, leases: Iterable[Lease], num_states: int, num_pages: int, num_windows: int = 0
) -> bool:
    """Whether so much could be had if everything that no lease holds was given up, wherever it lies."""
    layout = cache.layout
    pages, states, windows = set[PageId](), set[StateId](), set[WindowId]()
    for lease in leases:
        pages |= {*lease.pages, *lease.owned_pages()}
        states |= set(lease.owned_states())
        windows |= set(lease.windows)
        there = [entry.checkpoint for entry in lease.sources() if entry.checkpoint is not None]
        states |= {one.state for one in there if one.state is not None}
        windows |= {window for one in there for window in one.windows}
    in_pages = {cache.arena.pages.extent_of(page) for page in pages}
    in_states = {cache.arena.states.extent_of(state) for state in states}
    in_windows = {cache.arena.windows.extent_of(window) for window in windows}
    extents = cache.arena.budget_extents - len(in_pages) - len(in_states) - len(in_windows)
    pages_beside = len(in_pages) * layout.pages_per_extent - len(pages)
    states_beside = len(in_states) * layout.states_per_extent - len(states)
    if num_states > states_beside:
        extents -= -(-(num_states - states_beside) // layout.states_per_extent)
    windows_beside = len(in_windows) * layout.windows_per_extent - len(windows)
    if num_windows > windows_beside:
        extents -= -(-(num_windows - windows_beside) // layout.windows_per_extent)
    return extents >= 0 and num_pages <= pages_beside + extents * layout.pages_per_extent


def grown(ledger: Ledger, lease: Lease, num_tokens: int, keys: Sequence[PageKey] = KEYS) -> Lease:
    """`num_tokens` of the request are computed."""
    ledger.reserve(lease, num_tokens)
    ledger.launch(lease, num_tokens)
    ledger.commit(lease, num_tokens, keys)
    ledger.check()
    return lease


def scattered(ledger: Ledger, keys: Sequence[PageKey], path_pages: int = 5) -> None:
    """`path_pages + 1` extents: one for the checkpoint at the end of the first pages of `keys`, the rest for
    one of these pages each."""
    path, other = ledger.open("path"), ledger.open("other")
    for num_pages in range(1, path_pages):
        ledger.reserve(path, num_pages * P)
        ledger.reserve(other, num_pages * P)
    ledger.launch(other, (path_pages - 1) * P)
    ledger.commit(other, (path_pages - 1) * P, page_keys(ROOT, [1] * 20, P))
    ledger.release("other")
    ledger.keep_state(grown(ledger, path, path_pages * P, keys), last=True)
    ledger.release("path")
    assert len({entry.page // 2 for entry in ledger.index.match(keys[:path_pages]).path}) == path_pages
