"""Names of pages and checkpoints: a digest of all tokens up to the end, and of what else shaped the bytes."""

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
    """Everything besides the tokens that decides what an object's bytes mean, and who may read them."""

    model: str  # fingerprint of weights and configuration
    layout: str  # Shards.describe()
    salt: str = ""  # of the tenant

    def root(self) -> PageKey:
        fields = (self.model, self.layout, self.salt)
        return _digest(
            b"", b"".join(len(field.encode()).to_bytes(4, "little") + field.encode() for field in fields)
        )


class Kind(Enum):
    """What an object of the store holds."""

    PAGE = "p"
    CHECKPOINT = "c"  # a state
    WINDOW = "w"


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """An object of the store: a shard of the page that ends at `key`, of the window page of the same tokens,
    or of the state after the last of them. All of a namespace agree on the number of shards: shards.py."""

    kind: Kind
    key: PageKey
    shard: int = 0  # below 1 << 16

    def __str__(self) -> str:
        return f"{self.key.hex()}.{self.shard:04x}.{self.kind.value}"

    @classmethod
    def parse(cls, text: str) -> "ObjectKey":
        """The inverse of `str`. Raises ValueError."""
        digest, shard, kind = text.split(".")
        key = PageKey(bytes.fromhex(digest))
        if len(key) != DIGEST_BYTES:
            raise ValueError(f"{text} does not name an object")
        return cls(Kind(kind), key, int(shard, 16))


def chain(parent: PageKey, page: Sequence[int]) -> PageKey:
    """Key of the page that holds the tokens `page` and follows `parent`."""
    return _digest(parent, pack(f"<{len(page)}I", *page))


def page_keys(root: PageKey, tokens: Sequence[int], page_tokens: int) -> list[PageKey]:
    """Keys of the full pages of `tokens`, in order; key i covers tokens `[0, (i + 1) * page_tokens)`."""
    keys: list[PageKey] = []
    extend_keys(keys, root, tokens, page_tokens)
    return keys


def extend_keys(keys: list[PageKey], root: PageKey, tokens: Sequence[int], page_tokens: int) -> None:
    """Append the keys of the pages of `tokens` that are full now; `keys` has those of a prefix of them."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_tokens, len(tokens) // page_tokens * page_tokens, page_tokens):
        parent = chain(parent, tokens[start : start + page_tokens])
        keys.append(parent)


def _digest(parent: bytes, body: bytes) -> PageKey:
    return PageKey(blake2b(body, key=parent, digest_size=DIGEST_BYTES).digest())
