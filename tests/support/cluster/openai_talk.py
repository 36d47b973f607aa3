"""The `openai` SDK talking to the edge over a real socket, and a tool to talk about."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

from tests.support.cluster.fake_service import FakeService, app_over, serving
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer

ARGUMENTS: dict[str, object] = {
    "type": "object",
    "properties": {"person": {"type": "string", "enum": ["Emma", "Tom"]}},
    "required": ["person"],
    "additionalProperties": False,
}
LOOK: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "look", "description": "Looks for a person.", "parameters": ARGUMENTS},
}


@asynccontextmanager
async def conversing(service: FakeService, tokens: FolderTokenizer | None = None) -> AsyncGenerator[Any]:
    """A client of a server with this service: AsyncOpenAI, without the types of its many options."""
    async with (
        serving(app_over(service, tokens=tokens)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
