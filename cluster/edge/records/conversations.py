"""Stored responses and conversations: what clients need not send again.

A conversation that a client has made has a name. A chain of responses shares one without a name; an
answer to a response that is not its last one gets a copy up to there.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from tidemill.cluster.edge.records.account import CONVERSATIONS, TenantRecords, drop, size
from tidemill.cluster.edge.records.store import missing
from tidemill.workers.messages import RequestError

_BETWEEN = "SELECT id, body FROM tidemill_items WHERE conversation = ? AND position > ? AND position < ?"
PAGE_OF = {
    True: _BETWEEN + " ORDER BY position ASC LIMIT ?",
    False: _BETWEEN + " ORDER BY position DESC LIMIT ?",
}
"""The statement for a page, by whether its items are in ascending order."""

Item = tuple[str, str]
"""The id of an item, and its JSON."""


@dataclass(frozen=True, slots=True)
class StoredContext:
    """The items below position `length` of a conversation, which the input follows."""

    conversation: str = ""
    length: int = 0
    is_named: bool = False  # by the client: the conversation grows, whatever it has grown meanwhile
    items: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A complete response. Without a `body` only its items are kept, in a named conversation."""

    id: str
    body: str | None
    inputs: Sequence[Item]
    outputs: Sequence[Item]


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation; `metadata` is JSON."""

    id: str
    created_s: int
    metadata: str = "{}"
    length: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list of items."""

    items: Sequence[Item]
    has_more: bool


class TenantConversations(TenantRecords):
    """The conversations and responses of one tenant. What others have is missing here: RequestError (404)."""

    def context(self, previous: str | None, name: str | None, items_max: int) -> StoredContext:
        """Return all that an earlier response has seen, and its output, or all items of a conversation.
        Raises RequestError if there are more than `items_max`."""
        if previous is not None:
            conversation, _, length = self._response(
                previous, missing("previous_response", previous, "previous_response_id", status=400)
            )
        else:
            assert name is not None, "one of both is given"
            conversation, length = name, self.conversation(name).length
        rows = self._sent.rows(
            "SELECT body FROM tidemill_items WHERE conversation = ? AND position < ?"
            " ORDER BY position LIMIT ?",
            *(conversation, length, items_max + 1),
        )
        if len(rows) > items_max:
            raise RequestError(f"the conversation has more than {items_max} items: start another one")
        return StoredContext(conversation, length, previous is None, [body for (body,) in rows])

    def referenced(self, item: str) -> str | None:
        """Return the item of this id, of the conversation that has grown last."""
        rows = self._sent.rows(
            "SELECT i.body FROM tidemill_items i JOIN tidemill_conversations c ON c.id = i.conversation"
            " WHERE i.id = ? AND c.tenant = ? AND c.expires_s > ? ORDER BY c.expires_s DESC, c.id LIMIT 1",
            *(item, self._tenant, self._now_s),
        )
        return str(rows[0][0]) if rows else None

    def keep(self, context: StoredContext, response: StoredResponse) -> None:
        """Store a response, its input and its output. Raises RequestError if there is no room, or if its
        conversation is gone."""
        new = [*response.inputs, *response.outputs]
        if context.is_named:
            name = context.conversation
            start = self._grown(name, len(new))
        else:
            name, start = self._continued(context, f"of_{response.id}", len(new)), context.length
        if response.body is not None:
            self._sent.run(
                "INSERT INTO tidemill_responses VALUES (?, ?, ?, ?, ?, ?)",
                *(response.id, self._tenant, name, start + len(response.inputs), start + len(new)),
                response.body,
            )
        self._insert(name, start, new, 0 if response.body is None else size(response.body))

    def response(self, name: str) -> str:
        """Return a response as it was sent."""
        self._response(name)
        return str(self._sent.rows("SELECT body FROM tidemill_responses WHERE id = ?", name)[0][0])

    def delete_response(self, name: str) -> None:
        """Remove a response, and with the last one of a chain its items."""
        conversation, _, _ = self._response(name)
        self._lock(conversation)  # no response is added meanwhile
        removed = self._sent.rows("DELETE FROM tidemill_responses WHERE id = ? RETURNING body", name)
        is_last = (
            "id = ? AND is_named = 0 AND NOT EXISTS (SELECT 1 FROM tidemill_responses WHERE conversation = ?)"
        )
        if not drop(self._sent, CONVERSATIONS, is_last, conversation, conversation):
            for (body,) in removed:
                self.account.count(CONVERSATIONS, conversation, -size(body))

    def input_items(self, name: str, after: str | None, limit: int, *, ascending: bool) -> Page:
        """Return items that a response has seen, as `items` does."""
        conversation, num_input, _ = self._response(name)
        return self._page(conversation, num_input, after, limit, ascending=ascending)

    def create(self, new: StoredConversation, items: Sequence[Item] = (), *, is_named: bool = True) -> None:
        """Store a conversation with these items."""
        self._sent.run(
            "INSERT INTO tidemill_conversations VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            *(new.id, self._tenant, int(is_named), new.created_s, self._expires_s),
            *(new.length + len(items), new.metadata),
        )
        self._insert(new.id, 0, items, size(new.metadata))

    def conversation(self, name: str) -> StoredConversation:
        """Return a named conversation."""
        rows = self._sent.rows(
            "SELECT id, created_s, metadata, length FROM tidemill_conversations"
            " WHERE id = ? AND tenant = ? AND is_named = 1 AND expires_s > ?",
            *(name, self._tenant, self._now_s),
        )
        if not rows:
            raise missing("conversation", name)
        return StoredConversation(*rows[0])

    def set_metadata(self, name: str, metadata: str) -> StoredConversation:
        """Replace the metadata of a conversation and return it."""
        self._lock(name)
        before = self.conversation(name).metadata
        self._sent.run("UPDATE tidemill_conversations SET metadata = ? WHERE id = ?", metadata, name)
        self.account.count(CONVERSATIONS, name, size(metadata) - size(before))
        return self.conversation(name)

    def delete(self, name: str) -> None:
        """Remove a conversation, its items and its responses."""
        self.conversation(name)
        drop(self._sent, CONVERSATIONS, "id = ?", name)

    def num_chars(self, name: str) -> int:
        """Return the characters of a conversation's items."""
        sql = "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM tidemill_items WHERE conversation = ?"
        return int(self._sent.rows(sql, name)[0][0])

    def add(self, name: str, items: Sequence[Item]) -> list[Item]:
        """Add items to a named conversation, and return them as they are stored."""
        self.conversation(name)
        return self._insert(name, self._grown(name, len(items)), items)

    def _grown(self, name: str, num_items: int) -> int:
        """Return the first position of new items of a named conversation, which may have expired since it
        was read."""
        rows = self._sent.rows(
            "UPDATE tidemill_conversations SET length = length + ?, expires_s = ?"
            " WHERE id = ? AND tenant = ? AND is_named = 1 RETURNING length",
            *(num_items, self._expires_s, name, self._tenant),
        )
        if not rows:
            raise missing("conversation", name)
        return int(rows[0][0]) - num_items

    def items(self, name: str, after: str | None, limit: int, *, ascending: bool) -> Page:
        """Return at most `limit` items of a conversation, those behind the one with the id `after`."""
        return self._page(name, self.conversation(name).length, after, limit, ascending=ascending)

    def item(self, name: str, item: str) -> str:
        """Return an item of a conversation."""
        self.conversation(name)
        sql = "SELECT body FROM tidemill_items WHERE conversation = ? AND id = ?"
        rows = self._sent.rows(sql, name, item)
        if not rows:
            raise missing("item", item)
        return str(rows[0][0])

    def delete_item(self, name: str, item: str) -> StoredConversation:
        """Remove an item of a conversation, and return the conversation."""
        body = self.item(name, item)
        if self._sent.run("DELETE FROM tidemill_items WHERE conversation = ? AND id = ?", name, item):
            self.account.count(CONVERSATIONS, name, -size(body))
        return self.conversation(name)

    def _response(self, name: str, error: RequestError | None = None) -> tuple[str, int, int]:
        """Return conversation, num_input and num_items of a response. Raises `error` if it is not there."""
        rows = self._sent.rows(
            "SELECT r.conversation, r.num_input, r.num_items"
            " FROM tidemill_responses r JOIN tidemill_conversations c ON c.id = r.conversation"
            " WHERE r.id = ? AND r.tenant = ? AND c.expires_s > ?",
            *(name, self._tenant, self._now_s),
        )
        if not rows:
            raise error or missing("response", name)
        return rows[0][0], rows[0][1], rows[0][2]

    def _lock(self, name: str) -> None:
        self._sent.run("UPDATE tidemill_conversations SET length = length WHERE id = ?", name)

    def _continued(self, context: StoredContext, new_name: str, count: int) -> str:
        """Return a conversation with room for `count` items behind the context: the same, if it has no name
        and has not grown since, else a new one with a copy, also of what was deleted meanwhile."""
        known, length = context.conversation, context.length
        if known and self._sent.run(
            "UPDATE tidemill_conversations SET length = ?, expires_s = ?"
            " WHERE id = ? AND length = ? AND is_named = 0 AND expires_s > ?",
            *(length + count, self._expires_s, known, length, self._now_s),
        ):
            return known
        new = StoredConversation(new_name, self._now_s, length=length + count)
        self.create(new, is_named=False)
        self._insert(new_name, 0, [(json.loads(body)["id"], body) for body in context.items])
        return new_name

    def _insert(
        self, conversation: str, start: int, items: Sequence[Item], more_bytes: int = 0
    ) -> list[Item]:
        """Insert items, count them and more bytes, and return them. One with the id of another item of the
        conversation gets a new id, so that ids are cursors."""
        sql = "SELECT id FROM tidemill_items WHERE conversation = ?"
        taken = {name for (name,) in self._sent.rows(sql, conversation)} if start else set[str]()
        kept: list[Item] = []
        for position, (given, given_body) in enumerate(items, start):
            name, body = given, given_body
            if given in taken:
                others = (f"{given[:100]}_{number}" for number in count(position))
                name = next(other for other in others if other not in taken)
                body = json.dumps({**json.loads(body), "id": name}, ensure_ascii=False)
            taken.add(name)
            kept.append((name, body))
        rows = [(conversation, position, *item) for position, item in enumerate(kept, start)]
        self._sent.run_each("INSERT INTO tidemill_items VALUES (?, ?, ?, ?)", rows)
        item_bytes = sum(size(body) for _, body in kept)
        self.account.count(CONVERSATIONS, conversation, item_bytes + more_bytes)
        return kept

    def _page(
        self, conversation: str, length: int, after: str | None, limit: int, *, ascending: bool
    ) -> Page:
        """Return items below position `length`. Raises RequestError if `after` is none of them."""
        low, high = -1, length
        if after is not None:
            sql = "SELECT position FROM tidemill_items WHERE conversation = ? AND id = ? AND position < ?"
            rows = self._sent.rows(sql, conversation, after, length)
            if not rows:
                raise missing("item", after, "after")
            low, high = (rows[0][0], high) if ascending else (low, rows[0][0])
        found = self._sent.rows(PAGE_OF[ascending], conversation, low, high, limit + 1)
        return Page([(name, body) for name, body in found[:limit]], len(found) > limit)
