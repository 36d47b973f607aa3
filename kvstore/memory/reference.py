"""A ledger of pages alone: paged prefix caching in two screens, which the real one is tested against.

    request "a"   | page 7 | page 2 | page 9 |     a table of pages: full ones are shared by their keys
    request "b"   | page 7 | page 2 | page 4 |     with all requests that begin with the same tokens
    refs               2        2     1    1

A page that a request has written full is found by its key. When no request has it, it stays cached, until a
request needs memory: then the page goes that was used least recently and that no cached page follows.
The real ledger (`ledger.py`) adds states and windows, checkpoints, steps in flight, and eviction by value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey


@dataclass(eq=False)
class Page:
    refs: int = 1  # the requests that have it
    key: PageKey | None = None  # when it is full
    parent: "Page | None" = None
    children: int = 0  # the pages with keys that follow it
    used: int = 0


@dataclass
class ReferenceLedger:
    num_free: int
    page_tokens: int
    cached: dict[PageKey, Page] = field(default_factory=dict[PageKey, Page])
    tables: dict[str, list[Page]] = field(default_factory=dict[str, list[Page]])
    uses: int = 0

    def open(self, request_id: str, keys: Sequence[PageKey]) -> int:
        """Share the cached pages of the longest known prefix; return their number."""
        table = self.tables[request_id] = list[Page]()
        self.uses += 1
        for key in keys:
            if key not in self.cached:
                break
            table.append(self.cached[key])
            table[-1].refs += 1
            table[-1].used = self.uses
        return len(table)

    def reserve(self, request_id: str, num_tokens: int) -> None:
        """Give the request pages for `num_tokens`: all, or OutOfMemory and none."""
        missing = -(-num_tokens // self.page_tokens) - len(self.tables[request_id])
        if missing > self.num_free + sum(not page.refs for page in self.cached.values()):
            raise OutOfMemory(f"{missing} pages are more than all that no request has")
        for _ in range(missing):
            if not self.num_free:
                self._evict()
            self.num_free -= 1
            self.tables[request_id].append(Page())

    def commit(self, request_id: str, num_tokens: int, keys: Sequence[PageKey]) -> None:
        """Let others find the full pages of `[0, num_tokens)`. The first page under a key stays."""
        table = self.tables[request_id]
        for index in range(num_tokens // self.page_tokens):
            page, first = table[index], self.cached.get(keys[index])
            if page.key is not None:
                continue
            if first is not None:
                table[index] = first
                first.refs += 1
                self.num_free += 1
                continue
            self.uses += 1
            page.key, page.used = keys[index], self.uses
            page.parent = table[index - 1] if index else None
            if page.parent is not None:
                page.parent.children += 1
            self.cached[page.key] = page

    def release(self, request_id: str) -> None:
        for page in self.tables.pop(request_id):
            page.refs -= 1
            self.num_free += page.key is None

    def _evict(self) -> None:
        found = [key for key, page in self.cached.items() if not (page.refs or page.children)]
        page = self.cached.pop(min(found, key=lambda key: self.cached[key].used))
        if page.parent is not None:
            page.parent.children -= 1
        self.num_free += 1
