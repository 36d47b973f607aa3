"""/v1/conversations, and the stored responses below /v1/responses: their items, and their removal."""

import json
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from starlette.responses import Response

from tidemill.cluster.edge.apis.responses_body import ID
from tidemill.cluster.edge.apis.responses_storage import (
    ConversationBody,
    ItemsBody,
    MetadataBody,
    check_length,
    json_text,
    needed,
    stored_items,
)
from tidemill.cluster.edge.records.conversations import Page, StoredConversation, TenantConversations
from tidemill.cluster.edge.requests.caller import caller_of
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.usage import Json
from tidemill.workers.messages import RequestError

T = TypeVar("T")

LISTED = 20
LISTED_MAX = 100

Id = Annotated[str, InPath(pattern=ID.pattern)]
After = Annotated[
    str | None, Query(pattern=ID.pattern, description="the id of the item before the first one")
]
Limit = Annotated[int, Query(ge=1, le=LISTED_MAX)]
Order = Literal["asc", "desc"]


def add_record_routes(app: FastAPI, context: EdgeContext) -> None:
    stored = StoredRecords(context)
    response, conversation = "/v1/responses/{name}", "/v1/conversations/{name}"
    app.add_api_route(response, stored.response)
    app.add_api_route(response, stored.delete_response, methods=["DELETE"])
    app.add_api_route(f"{response}/input_items", stored.input_items)
    app.add_api_route("/v1/conversations", stored.create, methods=["POST"])
    app.add_api_route(conversation, stored.conversation)
    app.add_api_route(conversation, stored.set_metadata, methods=["POST"])
    app.add_api_route(conversation, stored.delete, methods=["DELETE"])
    app.add_api_route(f"{conversation}/items", stored.items)
    app.add_api_route(f"{conversation}/items", stored.add, methods=["POST"])
    app.add_api_route(f"{conversation}/items/{{item}}", stored.item)
    app.add_api_route(f"{conversation}/items/{{item}}", stored.delete_item, methods=["DELETE"])


class StoredRecords:
    """The endpoints. Each sees the records of its caller alone."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context

    async def response(self, name: Id, request: Request, *, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise RequestError("stream: a stored response is complete: leave it out", param="stream")
        body = await self._read(request, lambda own: own.response(name))
        return Response(body, media_type="application/json")

    async def delete_response(self, name: Id, request: Request) -> Json:
        """Delete a stored response. Its items stay as long as a later response continues it."""
        await self._write(request, lambda own: own.delete_response(name))
        return {"id": name, "object": "response", "deleted": True}

    async def input_items(
        self, name: Id, request: Request, after: After = None, limit: Limit = LISTED, order: Order = "desc"
    ) -> Json:
        """List all that a response has seen, also of earlier responses; the newest first."""
        is_up = order == "asc"
        return await self._read(
            request, lambda own: _listed(own.input_items(name, after, limit, ascending=is_up))
        )

    async def create(self, request: Request, body: ConversationBody | None = None) -> Json:
        """Make a conversation, which responses can name and grow."""
        body = body or ConversationBody()
        sources = self._context.sources
        new = StoredConversation(
            f"conv_{sources.new_id()}", int(sources.unix_time_s()), json_text(body.metadata or {})
        )
        items = stored_items(body.items or (), sources.new_id)
        await self._write(request, lambda own: own.create(new, items))
        return _shown(new)

    async def conversation(self, name: Id, request: Request) -> Json:
        """Return a conversation, without its items."""
        return _shown(await self._read(request, lambda own: own.conversation(name)))

    async def set_metadata(self, name: Id, request: Request, body: MetadataBody) -> Json:
        """Replace the metadata of a conversation."""
        metadata = json_text(body.metadata)
        return _shown(await self._write(request, lambda own: own.set_metadata(name, metadata)))

    async def delete(self, name: Id, request: Request) -> Json:
        """Delete a conversation, its items and its responses."""
        await self._write(request, lambda own: own.delete(name))
        return {"id": name, "object": "conversation.deleted", "deleted": True}

    async def items(
        self, name: Id, request: Request, after: After = None, limit: Limit = LISTED, order: Order = "desc"
    ) -> Json:
        """List the items of a conversation; the newest first."""
        is_up = order == "asc"
        return await self._read(request, lambda own: _listed(own.items(name, after, limit, ascending=is_up)))

    async def add(self, name: Id, request: Request, body: ItemsBody) -> Json:
        """Add items to a conversation, and return them."""
        items = stored_items(body.items, self._context.sources.new_id)

        def add(own: TenantConversations) -> Json:
            kept = own.add(name, items)
            check_length(own.num_chars(name), "items")
            return _listed(Page(kept, has_more=False))

        return await self._write(request, add)

    async def item(self, name: Id, item: Id, request: Request) -> Json:
        """Return an item of a conversation."""
        return await self._read(request, lambda own: json.loads(own.item(name, item)))

    async def delete_item(self, name: Id, item: Id, request: Request) -> Json:
        """Delete an item of a conversation, and return the conversation."""
        return _shown(await self._write(request, lambda own: own.delete_item(name, item)))

    async def _read(self, request: Request, work: Callable[[TenantConversations], T]) -> T:
        return await needed(self._context.records).read(self._tenant(request), TenantConversations, work)

    async def _write(self, request: Request, work: Callable[[TenantConversations], T]) -> T:
        return await needed(self._context.records).write(self._tenant(request), TenantConversations, work)

    def _tenant(self, request: Request) -> str:
        return caller_of(request.headers, self._context.keys).tenant


def _shown(conversation: StoredConversation) -> Json:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_s,
        "metadata": json.loads(conversation.metadata),
    }


def _listed(page: Page) -> Json:
    return listed([json.loads(body) for _, body in page.items], has_more=page.has_more)


def listed(rows: list[Json], *, has_more: bool) -> Json:
    """Return a list in the form of OpenAI."""
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"object": "list", "data": rows, "first_id": first, "last_id": last, "has_more": has_more}
