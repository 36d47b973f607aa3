"""The knowledge of a worker about a prompt that it gave memory to. The edge explains misses by it."""

from typing import Annotated, Literal, get_args

import msgspec

Depth = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A number of tokens from the start of a prompt."""


MissReason = Literal[
    "store_down",
    "store_slow",
    "fetch_failed",
    "other_worker",
    "evicted",
    "expired",
    "no_checkpoint",
    "not_held",
    "other_salt",
    "other_text",
    "never_seen",
    "prompt_logprobs",
    "last_page",
    "unknown",
]
"""The reasons for computing tokens; docs/troubleshooting.md has a row for each.

    other_worker        another worker can restore them, and the store did not have them
    no_checkpoint       a hybrid model: their pages are here, but no state after them
    not_held            an earlier prompt had them, but no worker can restore them
    other_salt          they are here under another salt of the same tenant
    other_text          an earlier prompt went on otherwise
    never_seen          no earlier prompt went on like this
    last_page           the last page of a prompt is always computed
    unknown             a worker of an earlier version does not report it
"""

MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)


class LookupEviction(msgspec.Struct, frozen=True, array_like=True):
    """The deepest depth of a prompt that could be restored before an eviction, `ago_s` seconds ago.

    `reason` is the class of objects that needed the memory (pages, states, windows), or run, clear, cap,
    resize. `tenant` is whose request needed it. `expired`: the time was over for which a client had asked to
    retain it.
    """

    depth: Depth
    reason: str
    ago_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    tenant: str = ""
    expired: bool = False


class CacheLookup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The findings of a worker about a prompt that it could not restore whole. Fields are only added, at the
    end.

    matched       depth of the pages in its memory, restorable or not
    eviction      None: no restorable depth is among the latest evictions
    stored        the deepest depth that the store seemed to have; it was not fetched whole if the worker
                  computed tokens below it
    store         "down", "late", "failed" (an object was missing or damaged), or empty
    other_text    the first and the last token that may be the first that differs from an earlier prompt
                  after the matched depth; None: no earlier prompt went on otherwise
    other_salt    depth of the same text under another salt of the same tenant
    """

    matched: Depth = 0
    eviction: LookupEviction | None = None
    stored: Depth = 0
    store: str = ""
    other_text: tuple[Depth, Depth] | None = None
    other_salt: Depth = 0


class CacheMiss(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens `[start, end)` of a prompt, which `worker` computed for this reason, in about `seconds`. The
    rest has what is known beside the reason: see CacheLookup. `elsewhere` is the worker that holds them."""

    reason: MissReason
    start: Depth
    end: Depth
    worker: str
    seconds: float
    eviction: LookupEviction | None = None
    other_text: tuple[Depth, Depth] | None = None
    elsewhere: str | None = None
