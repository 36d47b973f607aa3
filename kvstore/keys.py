"""Keys of pages and checkpoints: digests of all tokens up to their end, and of a namespace."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from struct import pack
from typing import NewType

PageKey = NewType("PageKey", bytes)

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The model, layout and tenant of an object: two namespaces never share an object."""

    model: str  # fingerprint of weights and configuration
    layout: str  # Shards.describe()
    salt: str = ""  # of the tenant

    def root(self) -> PageKey:
        fields = (self.model, self.layout, self.salt)
        return _digest(
            b"", b"".join(len(field.encode()).to_bytes(4, "little") + field.encode() for field in fields)
        )


class Kind(Enum):
    """The content of an object in a store."""

    PAGE = "p"
    CHECKPOINT = "c"  # a state
    WINDOW = "w"


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The key of an object in a store: one shard of a page, of a window page, or of a state.

    The page that ends at `key`, the window page of the same tokens and the state after them share
    `key`. The number of shards is the same in a namespace: shards.py.
    """

    kind: Kind
    key: PageKey
    shard: int = 0  # below 1 << 16

    def __str__(self) -> str:
        return f"{self.key.hex()}.{self.shard:04x}.{self.kind.value}"

    @classmethod
    def parse(cls, text: str) -> "ObjectKey":
        """Parse the result of `str`. Raises ValueError."""
        digest, shard, kind = text.split(".")
        key = PageKey(bytes.fromhex(digest))
        if len(key) != DIGEST_BYTES:
            raise ValueError(f"{text} is not the key of an object")
        return cls(Kind(kind), key, int(shard, 16))


def chain(parent: PageKey, page: Sequence[int]) -> PageKey:
    """Return the key of the page with the tokens `page` after the page of `parent`."""
    return _digest(parent, pack(f"<{len(page)}I", *page))


def page_keys(root: PageKey, tokens: Sequence[int], page_tokens: int) -> list[PageKey]:
    """Return the keys of the full pages of `tokens`; key i covers `[0, (i + 1) * page_tokens)`."""
    keys: list[PageKey] = []
    extend_keys(keys, root, tokens, page_tokens)
    return keys


def extend_keys(keys: list[PageKey], root: PageKey, tokens: Sequence[int], page_tokens: int) -> None:
    """Append the missing keys of full pages of `tokens`; `keys` has those of a prefix."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_tokens, len(tokens) // page_tokens * page_tokens, page_tokens):
        parent = chain(parent, tokens[start : start + page_tokens])
        keys.append(parent)


def _digest(parent: bytes, body: bytes) -> PageKey:
    return PageKey(blake2b(body, key=parent, digest_size=DIGEST_BYTES).digest())
