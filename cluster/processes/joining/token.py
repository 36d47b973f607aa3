"""The text of a token: what is public, a secret, and the fingerprint of the cluster's authority."""

import re
import secrets
import string
from dataclasses import dataclass
from typing import Self

from tidemill.kvstore.errors import TidemillError

_LETTERS = string.ascii_lowercase + string.digits
_FORM = re.compile(r"([a-z0-9]{6})\.([a-z0-9]{32})\.([0-9a-f]{64})")


class TokenError(TidemillError):
    """A text is no token."""


@dataclass(frozen=True, slots=True)
class Token:
    """`name` is public and names the token, `fingerprint` is the SHA-256 digest of the authority's key."""

    name: str
    secret: str
    fingerprint: str

    @classmethod
    def new(cls, fingerprint: str) -> Self:
        def letters(count: int) -> str:
            return "".join(secrets.choice(_LETTERS) for _ in range(count))

        return cls(letters(6), letters(32), fingerprint)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises TokenError."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise TokenError("--token is no token: give the text that `tidemill join-token` printed")
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"{self.name}.{self.secret}.{self.fingerprint}"
