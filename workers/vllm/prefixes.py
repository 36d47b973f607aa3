"""The prefixes that a server can restore, by its KV events, under the names of our edges. Pure.

    BlockStored: hash, its parent's hash, tokens, group  ->  key of kvstore/keys.py  ->  announced depth

vLLM names a block by the hash of all tokens up to its end. All groups of layers use the same hashes: a hybrid
model has its pages in one group and the states at the ends of blocks in another. A prefix can be restored
where every group has its last block, and the groups of pages have all blocks before it, too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from tidemill.kvstore.keys import Namespace, PageKey, chain
from tidemill.workers.messages import ANNOUNCED_KEY_BYTES, Announcement

BlockHash = int | bytes

PAGES = frozenset({"full_attention", "mla_attention"})
"""The kinds of groups whose blocks are all needed; of others only the last one is."""


class BlockStored(msgspec.Struct, tag=True):
    """Consecutive blocks of a group. A group that keeps some blocks only has fewer hashes than blocks, of
    which the last is at the end of the tokens."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[BlockHash]
    group_idx: int | None = None
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


Holder = tuple[int, str]
"""A group and its medium: blocks may be in the memory of the device and of the host."""


@dataclass(slots=True)
class _Prefix:
    parent: BlockHash | None
    depth: int  # tokens
    key: PageKey  # of all its tokens, if the depth is a multiple of the page
    holders: set[Holder] = field(default_factory=set[Holder])
    children: set[BlockHash] = field(default_factory=set["BlockHash"])
    whole: bool = False  # its block and those before it are in all groups of pages

    @property
    def groups(self) -> set[int]:
        return {group for group, _ in self.holders}


class Prefixes:
    """The prefixes of one server. `page_tokens` is the size of its blocks."""

    def __init__(self, fingerprint: str, layout: str, page_tokens: int, *, keeps_states: bool) -> None:
        """Create an empty set. With `keeps_states` nothing can be restored without a state."""
        self._names = fingerprint, layout
        self._page_tokens = page_tokens
        self._keeps_states = keeps_states
        self._known: dict[BlockHash, _Prefix] = {}
        self._kinds: dict[int, str] = {}  # of groups
        self.announced: set[bytes] = set()
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def root(self, salt: str) -> PageKey:
        model, layout = self._names
        return Namespace(model=model, layout=layout, salt=salt).root()

    def restorable(self, keys: Iterable[bytes]) -> int:
        """Return the deepest depth, in tokens, among the keys of a prompt's pages that can be restored."""
        depths = (number for number, key in enumerate(keys, 1) if key in self.announced)
        return max(depths, default=0) * self._page_tokens

    def take(self, *, full: bool) -> Announcement:
        """Return what changed since the last call, or everything."""
        added, removed = self._added, self._removed
        self._added, self._removed = set(), set()
        if full:
            return Announcement(added=tuple(self.announced), full=True)
        return Announcement(added=tuple(added), removed=tuple(removed))

    def clear(self) -> None:
        """Forget everything: it was dropped, or events were lost."""
        self._known.clear()
        for key in list(self.announced):
            self._announce(key, restorable=False)

    def apply(self, batch: EventBatch) -> None:
        touched: dict[BlockHash, None] = {}
        num_groups = len(self._kinds)
        for event in batch.events:
            match event:
                case BlockStored():
                    touched |= dict.fromkeys(self._stored(event))
                case BlockRemoved():
                    holder = (event.group_idx or 0, event.medium or "")
                    for name in event.block_hashes:
                        if name in self._known:
                            self._known[name].holders.discard(holder)
                            touched[name] = None
                case AllBlocksCleared():
                    self.clear()
                    touched.clear()
        if len(self._kinds) > num_groups:
            touched |= dict.fromkeys(self._known)
        for name in touched:
            self._settle(name)
        for name in touched:
            self._forget(name)

    def _stored(self, event: BlockStored) -> Iterator[BlockHash]:
        """Add the blocks of an event and yield them. Blocks behind an unknown parent are not named."""
        group = event.group_idx or 0
        self._kinds[group] = event.kv_cache_spec_kind or "full_attention"
        parent = event.parent_block_hash
        before = self._known.get(parent) if parent is not None else None
        if parent is not None and before is None:
            return
        root = self.root(_salt_of(event)) if before is None else before.key
        depth, tokens, size = 0 if before is None else before.depth, event.token_ids, event.block_size
        if len(event.block_hashes) * size != len(tokens):  # some blocks between are not kept
            event = msgspec.structs.replace(event, block_hashes=event.block_hashes[-1:])
            size = len(tokens)
        key = root
        for index, name in enumerate(event.block_hashes):
            part = tokens[index * size : (index + 1) * size]
            key = self._chained(key, depth, part)
            depth += len(part)
            prefix = self._known.setdefault(name, _Prefix(None, depth, key))
            if parent is not None and (prefix.parent is None or self._kinds[group] in PAGES):
                if prefix.parent in self._known:  # a group that skips blocks named an earlier one
                    self._known[prefix.parent].children.discard(name)
                prefix.parent = parent
                self._known[parent].children.add(name)
            prefix.holders.add((group, event.medium or ""))
            yield name
            parent = name

    def _chained(self, key: PageKey, depth: int, tokens: list[int]) -> PageKey:
        """Return the key of the pages of `tokens` after those of `key`. What does not fill a page, or follows
        on what does not, has a key of its own, which no edge asks for."""
        if depth % self._page_tokens or len(tokens) % self._page_tokens:
            return chain(chain(key, tokens), ())
        for start in range(0, len(tokens), self._page_tokens):
            key = chain(key, tokens[start : start + self._page_tokens])
        return key

    def _settle(self, name: BlockHash) -> None:
        """Decide again what can be restored, from this block on."""
        pages = {group for group, kind in self._kinds.items() if kind in PAGES}
        states_known = not self._keeps_states or len(pages) < len(self._kinds)
        pending = [name]
        while pending:
            prefix = self._known[pending.pop()]
            before = None if prefix.parent is None else self._known.get(prefix.parent)
            whole = prefix.groups >= pages and (
                prefix.parent is None or (before is not None and before.whole)
            )
            if whole != prefix.whole:
                prefix.whole = whole
                pending += prefix.children
            restorable = whole and states_known and prefix.groups >= self._kinds.keys()
            self._announce(prefix.key[:ANNOUNCED_KEY_BYTES], restorable=restorable)

    def _announce(self, key: bytes, *, restorable: bool) -> None:
        if restorable == (key in self.announced):
            return
        (self.announced.add if restorable else self.announced.discard)(key)
        changed, undone = (self._added, self._removed) if restorable else (self._removed, self._added)
        if key in undone:
            undone.discard(key)
        else:
            changed.add(key)

    def _forget(self, name: BlockHash) -> None:
        """Drop a block that no group holds and nothing follows on, and those before it likewise."""
        while (prefix := self._known.get(name)) is not None and not prefix.holders and not prefix.children:
            del self._known[name]
            if prefix.parent is None or prefix.parent not in self._known:
                return
            self._known[prefix.parent].children.discard(name)
            name = prefix.parent


def _salt_of(event: BlockStored) -> str:
    """Return the salt of the first block of a prompt: what else names it, such as an adapter, is in it, too,
    so that no edge asks for that."""
    extra = (event.extra_keys or [None])[0]
    match extra:
        case None | []:
            return ""
        case [str() as salt]:
            return salt
        case _:
            return f"{extra!r}"
