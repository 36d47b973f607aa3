"""The texts of the latest requests of one worker, to find the token at which a prompt leaves them.

Only texts of the same tenant are compared token by token. Otherwise a client could guess another one's prompt
token by token. They are compared only for requests that ask for it.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple

from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.workers.scheduling.sequence import Sequence

TEXTS_MAX = 128
TOKENS_MAX = 1 << 17
"""The limits of what is kept, about 5 MB: of each request the tokens that it computed and drew."""

ROOTS_MAX = 256
"""The namespaces that are remembered, each with its tenant."""


class Text(NamedTuple):
    """The tokens of a sequence after its first `first` pages, the keys of their pages, and that of the page
    before them, or the root."""

    tenant: str
    first: int
    parent: PageKey
    keys: Seq[PageKey]
    tokens: Seq[int]


class RecentTexts:
    def __init__(self, tokens_max: int = TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._texts: deque[Text] = deque()
        self._num_tokens = 0
        self._roots: OrderedDict[PageKey, str] = OrderedDict()

    def add(self, sequence: Sequence) -> None:
        """Keep the tokens of a sequence that ends, if its tenant has a name."""
        if not sequence.request.tenant:
            return
        self._roots[sequence.root] = sequence.request.tenant
        self._roots.move_to_end(sequence.root)
        if len(self._roots) > ROOTS_MAX:
            self._roots.popitem(last=False)
        found = sequence.provenance
        text = _text_of(sequence, (found.reused_tokens + found.fetched_tokens) // sequence.page_tokens)
        self._texts.append(text)
        self._num_tokens += len(text.tokens)
        while self._num_tokens > self._tokens_max or len(self._texts) > TEXTS_MAX:
            self._num_tokens -= len(self._texts.popleft().tokens)

    def first_difference(self, sequence: Sequence, running: Iterable[Sequence]) -> tuple[int, bool] | None:
        """Return how many tokens of a prompt its tenant has sent or got lately, and whether an earlier text
        went on otherwise there. None: no earlier text begins as it."""
        mine = sequence.request.tenant
        if not mine:
            return None
        kept = (text for text in self._texts if text.tenant == mine)
        others = (other for other in running if other is not sequence and other.request.tenant == mine)
        found = (_agreed(sequence, text) for text in chain(kept, (_text_of(other, 0) for other in others)))
        return max((agreed for agreed in found if agreed is not None), default=None)

    def depth_under_other_salt(self, sequence: Sequence, index: PrefixIndex) -> int:
        """Return how many tokens of a prompt are in the index under another salt of its tenant."""
        size, deepest = sequence.page_tokens, 0
        for root, tenant in self._roots.items():
            if tenant == sequence.request.tenant and root != sequence.root:
                keys = page_keys(root, sequence.tokens[:size], size)
                if index.match(keys).path:
                    keys = page_keys(root, sequence.tokens[: sequence.boundary], size)
                    deepest = max(deepest, len(index.match(keys).path) * size)
        return deepest


def _text_of(sequence: Sequence, first: int) -> Text:
    return Text(
        tenant=sequence.request.tenant,
        first=first,
        parent=sequence.keys[first - 1] if first else sequence.root,
        keys=sequence.keys[first:],
        tokens=sequence.tokens[first * sequence.page_tokens :],
    )


def _agreed(sequence: Sequence, text: Text) -> tuple[int, bool] | None:
    """Return how many tokens a prompt has in common with a text, and whether the text goes on after them."""
    first, size = text.first, sequence.page_tokens
    if first > len(sequence.keys) or text.parent != (sequence.keys[first - 1] if first else sequence.root):
        return None
    mine = sequence.keys[first:]
    # A key depends on all tokens before it.
    both = range(min(len(mine), len(text.keys)))
    pages = bisect_left(both, True, key=lambda page: mine[page] != text.keys[page])  # noqa: FBT003
    start = (first + pages) * size
    tail = zip(sequence.tokens[start:], text.tokens[pages * size :], strict=False)
    left = len(text.tokens) - pages * size
    most = min(len(sequence.tokens) - start, left)
    equal = next((count for count, (token, other) in enumerate(tail) if token != other), most)
    return start + equal, equal < left
