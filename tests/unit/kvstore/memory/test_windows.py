"""Window pages: those that a depth needs, those of a lease, and those that checkpoints share."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kvstore.leases import KEYS, ROOT, a_cache, a_ledger, grow
from tests.support.kvstore.leases import P as PAGE
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import WINDOWS, Attention, Latent, LayerSpec, Layout, Window, layout_of
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger

PROPERTY = settings(deadline=None, derandomize=True, max_examples=300)

shapes = st.tuples(st.integers(1, 9), st.integers(1, 40))
"""The tokens of a page, and of the window."""


def a_layout(page_tokens: int, window: int) -> Layout:
    layers = (Attention(kv_heads=1, head_dim=1), Window(kv_heads=1, head_dim=1, tokens=window))
    return layout_of(layers, page_tokens, extent_bytes_min=1, granule_bytes=1)


def visible_pages(page_tokens: int, window: int, depth: int) -> set[int]:
    """Return the pages of the tokens that the token at `depth` sees."""
    return {position // page_tokens for position in range(max(0, depth - window + 1), depth)}


@PROPERTY
@given(shapes, st.integers(0, 12))
def test_last_window_is_exactly_what_the_next_token_sees(shape: tuple[int, int], depth_pages: int) -> None:
    size, window = shape
    layout = a_layout(size, window)
    positions = layout.last_window(depth_pages)
    visible = visible_pages(size, max(window, 2), depth_pages * size)  # at least one page
    assert set(positions) == visible
    assert layout.first_visible_window(depth_pages * size) == positions.start
    assert layout.checkpoint_bytes == len(layout.last_window(1000)) * layout.window_bytes


@PROPERTY
@given(shapes, st.integers(0, 60), st.integers(1, 30))
def test_peak_windows_is_a_tight_bound(shape: tuple[int, int], depth: int, in_flight: int) -> None:
    size, window = shape
    layout = a_layout(size, window)
    pinned = len(range(layout.first_visible_window(depth), -(-(depth + in_flight) // size)))
    assert pinned <= layout.peak_windows(depth + in_flight, in_flight)
    reach = range(10 * (window + in_flight), 10 * (window + in_flight) + size)
    peak = max(len(range(layout.first_visible_window(at), -(-(at + in_flight) // size))) for at in reach)
    assert layout.peak_windows(1 << 20, in_flight) - 1 <= peak


@pytest.mark.parametrize("window", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 5])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_long_prompt_pins_only_its_window_and_steps_in_flight(window: int, chunk: int) -> None:
    ledger = a_ledger(120, hybrid=False, window=window)
    tokens = list(range(150))
    keys = page_keys(ROOT, tokens, PAGE)
    lease = ledger.open("long")
    peak = 0
    for start, end in pairwise([*range(0, 150, chunk), 150]):
        ledger.reserve(lease, end)
        ledger.launch(lease, end)
        peak = max(peak, len(lease.windows))
        if len(lease.flights) == 2:
            ledger.commit(lease, start, keys)
        ledger.check()
    assert peak <= -(-(window - 1 + 2 * chunk) // PAGE) + 1
    ledger.commit(lease, 150, keys)
    assert lease.first_window == ledger.layout.first_visible_window(150)
    assert lease.window_table[: lease.first_window] == (0,) * lease.first_window
    ledger.release("long")
    assert ledger.usage().pinned[WINDOWS] == 0


def test_checkpoint_shares_the_window_of_its_lease_and_outlives_it() -> None:
    ledger = a_ledger(20, hybrid=False, window=2 * PAGE + 1)
    lease = grow(ledger, ledger.open("a"), 3 * PAGE)
    pinned = ledger.usage().pinned[WINDOWS]
    assert ledger.keep_state(lease)
    _check_windows(ledger, pinned=pinned, cached=0)
    window = lease.shared_entries[-1].checkpoint
    assert window is not None
    assert window == ((), tuple(lease.windows))
    grow(ledger, lease, 4 * PAGE)
    assert ledger.keep_state(lease)
    assert lease.shared_entries[-1].checkpoint is not None
    assert lease.shared_entries[-1].checkpoint.windows[0] == window.windows[1], (
        "the common page is not shared"
    )
    ledger.release("a")
    _check_windows(ledger, pinned=0, cached=3)
    again = _resume(ledger, "b", KEYS[:3])
    assert tuple(again.windows) == window.windows
    assert again.first_window == 1
    _check_windows(ledger, pinned=2, cached=1)


def test_evicting_a_checkpoint_frees_only_unshared_window_pages() -> None:
    cache = a_cache(20, hybrid=False, window=2 * PAGE + 1)
    ledger = Ledger(cache)
    lease = ledger.open("a")
    for depth in (2, 3):
        ledger.keep_state(grow(ledger, lease, depth * PAGE))
    ledger.release("a")
    _check_windows(ledger, pinned=0, cached=3)
    _resume(ledger, "b", KEYS[:2])
    _check_windows(ledger, pinned=2, cached=1)
    entry = ledger.index.cheapest_checkpoint()
    assert entry is not None
    assert entry.depth_pages == 3, "the other checkpoint is read"
    cache.drop_checkpoint(entry, "test")
    _check_windows(ledger, pinned=2, cached=0)
    ledger.release("b")
    _check_windows(ledger, pinned=0, cached=2)


def test_window_page_evicts_a_checkpoint_and_then_pages() -> None:
    """The lease needs all of the 6 extents, of two pages or two window pages each."""
    ledger = a_ledger(6, hybrid=False, window=PAGE + 1)
    lease = grow(ledger, ledger.open("a"), 4 * PAGE)
    ledger.keep_state(lease, last=True)
    ledger.release("a")
    assert ledger.usage().cached[WINDOWS] == 1
    other = ledger.open("b")
    ledger.reserve(other, 6 * PAGE)
    ledger.check()
    assert (len(other.private_pages), len(other.windows)) == (6, 6)
    assert not len(ledger.index), "an entry was not evicted"


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([Window(kv_heads=1, head_dim=1, tokens=4)], "without attention"),
        ([Attention(kv_heads=1, head_dim=1), Window(kv_heads=1, head_dim=1, tokens=0)], "window of 0"),
        ([Attention(kv_heads=1, head_dim=1), Latent(width=3)], "two kinds of pages"),
        (
            [Attention(kv_heads=1, head_dim=1), *(Window(kv_heads=n, head_dim=1, tokens=4) for n in (1, 2))],
            "number of",
        ),
    ],
)
def test_layout_of_rejects_unsupported_layers(layers: list[LayerSpec], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        layout_of(layers, 4)


def _resume(ledger: Ledger, name: str, keys: list[PageKey]) -> Lease:
    lease = ledger.open(name)
    match = ledger.index.match(keys)
    ledger.attach(lease, match, match.restorable_pages)
    ledger.check()
    return lease


def _check_windows(ledger: Ledger, *, pinned: int, cached: int) -> None:
    ledger.check()
    usage = ledger.usage()
    assert (usage.pinned[WINDOWS], usage.cached[WINDOWS]) == (pinned, cached)
