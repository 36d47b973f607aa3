"""The context that a response continues, and the forms in which it, its input and its output are stored.

Items are stored as clients send and get them, so that a chain renders to the same bytes as a client's
own replay of it.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, Field

from tidemill.cluster.edge.apis.json_bytes import json_bytes
from tidemill.cluster.edge.apis.responses_body import ID, InputItem, Metadata, ResponsesBody
from tidemill.cluster.edge.records.account import size
from tidemill.cluster.edge.records.conversations import (
    Item,
    StoredContext,
    StoredResponse,
    TenantConversations,
)
from tidemill.cluster.edge.records.store import Records, missing
from tidemill.cluster.edge.requests.bodies import MESSAGES_MAX
from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX
from tidemill.cluster.edge.requests.usage import Json
from tidemill.workers.messages import RequestError

ITEMS_ADDED_MAX = 20
"""The most items that come in one request for a conversation, as at OpenAI."""

CONTEXT_BYTES_MAX = BODY_BYTES_MAX
"""The most that is stored of one conversation before it is refused: as much as a client could send."""

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ItemsBody(BaseModel, strict=True, extra="ignore"):
    """The body of POST /v1/conversations/ID/items."""

    items: list[InputItem] = Field(min_length=1, max_length=ITEMS_ADDED_MAX)


class MetadataBody(BaseModel, strict=True, extra="ignore"):
    """The body of POST /v1/conversations/ID."""

    metadata: Metadata


class ConversationBody(BaseModel, strict=True, extra="ignore"):
    """The body of POST /v1/conversations."""

    items: list[InputItem] | None = Field(default=None, max_length=ITEMS_ADDED_MAX)
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """The destination of a response: behind `context`. Without `keeps_body` a conversation gets its items."""

    records: Records
    tenant: str
    context: StoredContext
    inputs: Sequence[Item]
    keeps_body: bool

    async def keep(self, name: str, whole: Json) -> None:
        """Return when the response is on disk. Raises Unserved, and RequestError if its conversation is
        gone or the tenant stores too much."""

        def keep(own: TenantConversations) -> None:
            output = cast("list[dict[str, Any]]", whole["output"])
            response = StoredResponse(
                id=name,
                body=json_text(whole) if self.keeps_body else None,
                inputs=self.inputs,
                outputs=[(item["id"], json_text(item)) for item in output],
            )
            own.keep(self.context, response)

        await self.records.write(self.tenant, TenantConversations, keep)


async def with_context(
    records: Records | None, body: ResponsesBody, tenant: str, new_id: Callable[[], str]
) -> tuple[ResponsesBody, Storage | None]:
    """Return the body with all that the model is to see as its input, and where the response is stored; None:
    it is not. Raises RequestError and Unserved."""
    previous, conversation = body.previous_response_id, body.conversation
    if previous and conversation:
        raise RequestError(
            "conversation has all responses of it: leave out previous_response_id", param="conversation"
        )
    asked = "previous_response_id" if previous else "conversation" if conversation else "input"
    stores = body.store is not False
    context, inputs = StoredContext(), body.input
    if previous or conversation or any(item.type == "item_reference" for item in inputs):
        items_max = MESSAGES_MAX - len(inputs)

        def read(own: TenantConversations) -> tuple[StoredContext, list[InputItem], list[InputItem]]:
            found = own.context(previous, conversation, items_max) if previous or conversation else context
            check_length(sum(map(len, found.items)), asked)
            return found, [_item(text) for text in found.items], [_resolved(item, own) for item in inputs]

        context, before, inputs = await needed(records, asked).read(tenant, TenantConversations, read)
        body = body.model_copy(update={"input": [*before, *inputs]})
    if records is None or not (stores or conversation):
        return body, None
    items = stored_items(inputs, new_id)
    num_bytes = sum(size(text) for _, text in items)
    await records.read(tenant, TenantConversations, lambda own: own.account.check_room(num_bytes))
    return body, Storage(records, tenant, context, items, stores)


def check_length(num_chars: int, param: str) -> None:
    """Raise RequestError if a conversation has become too long."""
    if num_chars > CONTEXT_BYTES_MAX:
        raise RequestError(
            f"{param}: more than {CONTEXT_BYTES_MAX >> 20} MiB are stored: start another one", param=param
        )


def needed(records: Records | None, param: str | None = None) -> Records:
    """Return the records; raises RequestError where there is no database."""
    if records is None:
        raise RequestError(
            f"{param}: " * (param is not None)
            + "this server stores nothing: serve it with --database, or send the whole conversation in input",
            param=param,
            status=404 if param is None else 400,
            code="unsupported_parameter" if param else "no_database",
        )
    return records


def stored_items(items: Iterable[InputItem], new_id: Callable[[], str]) -> list[Item]:
    """Return items of an input as they are stored. Each has an id, and the content of messages is parts."""
    return [_stored(item, new_id) for item in items]


def _stored(item: InputItem, new_id: Callable[[], str]) -> Item:
    name = item.id if item.id and ID.fullmatch(item.id) else f"{PREFIXES.get(item.type, 'item')}_{new_id()}"
    fields = {**item.given, "id": name, "type": item.type}
    if item.type == "message":
        content, is_answer = fields.get("content"), item.role == "assistant"
        if not isinstance(content, list):
            kind: Json = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
            fields["content"] = [{**kind, "text": content or ""}]
        fields.setdefault("status", "completed")
    return name, json_text(fields)


def json_text(value: object) -> str:
    return json_bytes(value).decode()


def _item(text: str) -> InputItem:
    return InputItem.model_validate(json.loads(text))


def _resolved(item: InputItem, own: TenantConversations) -> InputItem:
    """Return the item that another one refers to. Raises RequestError."""
    if item.type != "item_reference":
        return item
    name = item.id or ""
    text = own.referenced(name) if ID.fullmatch(name) else None
    if text is None:
        raise missing("item", name, "input")
    return _item(text)
