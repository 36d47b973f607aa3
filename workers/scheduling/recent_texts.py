"""The texts of the latest requests of one worker, to find the token at which a prompt leaves them.

Only texts of the same tenant are compared token by token. Otherwise a client could guess another one's prompt
token by token. They are compared only for requests that ask for it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.workers.scheduling.sequence import Sequence as Running

TEXTS_MAX = 128
TOKENS_MAX = 1 << 17
"""The limits of what is kept, about 5 MB: of each request the tokens that it computed and drew."""

ROOTS_MAX = 256
"""The namespaces that are remembered, each with the tenant of its latest request."""


class Text(NamedTuple):
    """The tokens of a sequence after its first `first` pages, and the keys of all its pages."""

    tenant: str
    root: PageKey
    keys: Sequence[PageKey]
    first: int
    tokens: Sequence[int]


class RecentTexts:
    def __init__(self, tokens_max: int = TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._texts: deque[Text] = deque()
        self._num_tokens = 0
        self._roots: OrderedDict[PageKey, str] = OrderedDict()

    def add(self, sequence: Running) -> None:
        """Keep the tokens of a sequence that ends; it must not change later."""
        tenant, found = sequence.request.tenant, sequence.provenance
        self._roots[sequence.root] = tenant
        self._roots.move_to_end(sequence.root)
        if len(self._roots) > ROOTS_MAX:
            self._roots.popitem(last=False)
        if not tenant:
            return
        first = (found.reused_tokens + found.fetched_tokens) // sequence.page_tokens
        tokens = sequence.tokens[first * sequence.page_tokens :]
        self._texts.append(Text(tenant, sequence.root, sequence.keys, first, tokens))
        self._num_tokens += len(tokens)
        while self._num_tokens > self._tokens_max or len(self._texts) > TEXTS_MAX:
            self._num_tokens -= len(self._texts.popleft().tokens)

    def first_difference(self, sequence: Running, running: Iterable[Running]) -> tuple[int, bool] | None:
        """Return how many tokens of a prompt its tenant has sent or got lately, and whether an earlier text
        went on otherwise there. None: no earlier text begins as it."""
        mine = sequence.request.tenant
        others = (
            Text(other.request.tenant, other.root, other.keys, 0, other.tokens)
            for other in running
            if other is not sequence
        )
        texts = [text for text in chain(self._texts, others) if mine and text.tenant == mine]
        found = (_agreed(sequence, text) for text in texts)
        return max((agreed for agreed in found if agreed is not None), default=None)

    def depth_under_other_salt(self, sequence: Running, index: PrefixIndex) -> int:
        """Return how many tokens of a prompt are in the index under another salt of its tenant."""
        size, deepest = sequence.page_tokens, 0
        for root, tenant in self._roots.items():
            if tenant == sequence.request.tenant and root != sequence.root:
                keys = page_keys(root, sequence.tokens[:size], size)
                if index.match(keys).path:
                    keys = page_keys(root, sequence.tokens[: sequence.boundary], size)
                    deepest = max(deepest, len(index.match(keys).path) * size)
        return deepest


def _agreed(sequence: Running, text: Text) -> tuple[int, bool] | None:
    """Return how many tokens a prompt has in common with a text, and whether the text goes on after them."""
    first, size = text.first, sequence.page_tokens
    if text.root != sequence.root or first > len(sequence.keys):
        return None
    if first and text.keys[first - 1] != sequence.keys[first - 1]:
        return None
    pairs = enumerate(zip(sequence.keys[first:], text.keys[first:], strict=False))
    pages = next((page for page, (mine, other) in pairs if mine != other), None)
    pages = min(len(sequence.keys), len(text.keys)) - first if pages is None else pages
    start = (first + pages) * size
    tail = zip(sequence.tokens[start:], text.tokens[pages * size :], strict=False)
    equal = next((count for count, (mine, other) in enumerate(tail) if mine != other), None)
    left = len(text.tokens) - pages * size
    equal = min(len(sequence.tokens) - start, left) if equal is None else equal
    return start + equal, equal < left
