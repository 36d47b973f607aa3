"""Small ledgers and leases, and a memory that is cut to pieces."""

from collections.abc import Sequence

from tidemill.kvstore.arena import Arena
from tidemill.kvstore.backing import Fixed
from tidemill.kvstore.keys import Namespace, PageKey, page_keys
from tidemill.kvstore.layout import Attention, Linear, layout_of
from tidemill.kvstore.ledger import Lease, Ledger

P = 2
ROOT = Namespace(model="m", layout="l").root()
TOKENS = list(range(20))
KEYS = page_keys(ROOT, TOKENS, P)


def a_ledger(num_extents: int, states_per_extent: int = 1, *, hybrid: bool = True) -> Ledger:
    """16 bytes per page of two tokens, 32 per state: two pages or one state, `states_per_extent` times."""
    linear = Linear(key_heads=1, value_heads=1, key_dim=1, value_dim=2, conv_width=2)
    attention = Attention(kv_heads=1, head_dim=1)
    layers = (linear, attention) if hybrid else (attention,)
    layout = layout_of(layers, P, extent_bytes_min=32 * states_per_extent, granule_bytes=1)
    assert layout.pages_per_extent == 2 * states_per_extent
    return Ledger(layout, Arena(layout, num_extents, Fixed(num_extents * layout.extent_bytes)))


def grown(ledger: Ledger, lease: Lease, num_tokens: int, keys: Sequence[PageKey] = KEYS) -> Lease:
    """`num_tokens` of the request are computed."""
    ledger.reserve(lease, num_tokens)
    ledger.commit(lease, num_tokens, keys)
    ledger.check()
    return lease


def scattered(ledger: Ledger, keys: Sequence[PageKey]) -> None:
    """Six extents: one for the checkpoint of the first five pages of `keys`, the others for a page each."""
    path, other = ledger.open("path"), ledger.open("other")
    for num_pages in range(1, 5):
        ledger.reserve(path, num_pages * P)
        ledger.reserve(other, num_pages * P)
    ledger.commit(other, 4 * P, page_keys(ROOT, [1] * 20, P))
    ledger.release("other")
    ledger.keep_state(grown(ledger, path, 5 * P, keys), last=True)
    ledger.release("path")
    assert len({entry.page // 2 for entry in ledger.index.match(keys[:5]).path}) == 5
