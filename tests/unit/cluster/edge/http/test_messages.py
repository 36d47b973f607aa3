"""/v1/messages with the `anthropic` SDK over a real socket: blocks, streams, old turns, refusals."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from tests.support.cluster.fake_service import FakeService, app_over, call, saying, serving
from tests.support.cluster.openai_talk import ARGUMENTS
from tests.unit.cluster.edge.http.test_tools import CALLING, prompts_of, tokenizer
from tidemill.cluster.edge.apis.messages_body import MessagesBody
from tidemill.workers.messages import RequestError, Unserved

LOOK: Any = {"name": "look", "description": "Looks for a person.", "input_schema": ARGUMENTS}
HELLO: Any = [{"role": "user", "content": "Hello!"}]
THINKS: Any = {"chat_template_kwargs": {"thinks": True}}
ALL = f"Hm.</think>\n\nI shall look.\n{CALLING}\n{CALLING}"
EPHEMERAL = {"type": "ephemeral"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.a1b; cch=c2d3;\n"


@asynccontextmanager
async def conversing(service: FakeService) -> AsyncGenerator[AsyncAnthropic]:
    async with (
        serving(app_over(service, tokens=tokenizer())) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


def text(words: str, **more: object) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def chat_of(**fields: Any) -> Any:  # noqa: ANN401 - as JSON has it
    return MessagesBody.model_validate({"messages": HELLO, **fields}).chat()


def turns(**fields: Any) -> list[tuple[str, str]]:  # noqa: ANN401
    return [(turn.role, turn.content or "") for turn in chat_of(**fields).messages]


async def test_message_is_answered() -> None:
    service = FakeService(saying("She is in the tower."))

    async with conversing(service) as client:
        found = await client.messages.with_raw_response.create(
            model="keeper",
            max_tokens=20_000,
            messages=HELLO,
            system=[{"type": "text", "text": BILLING + "Be short.", "cache_control": {"type": "ephemeral"}}],
            metadata={"user_id": "user_ab_account__session_0f0e0d0c-1111-2222-3333-444455556666"},
            extra_headers={"anthropic-beta": "context-management-2025-06-27"},
            extra_body={"context_management": {"edits": []}, "seed": 3, "temperature": 0.5, "top_k": 4},
        )
        reply = await found.parse()
        assert found.headers["x-tidemill-ignored"] == "context_management"
        assert found.headers["request-id"] == found.headers["x-request-id"]
        assert [block.text for block in reply.content if block.type == "text"] == ["She is in the tower."]
        assert (reply.role, reply.model, reply.stop_reason) == ("assistant", "keeper", "end_turn")
        usage = reply.usage
        assert usage.cache_read_input_tokens is not None
        assert usage.cache_read_input_tokens > 0
        (request,) = service.requests
        assert usage.input_tokens + usage.cache_read_input_tokens == len(request.tokens)
        counted = await client.messages.count_tokens(model="keeper", messages=HELLO, system="Be short.")
        assert counted.input_tokens == len(request.tokens)
    (request,) = service.requests
    assert prompts_of(service)[0].startswith("<|system|> Be short.<|end|>\n<|user|> Hello!<|end|>")
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 4)
    assert len(request.tokens) + request.max_new_tokens == service.model.max_model_len
    assert request.breakpoints
    assert request.session


@pytest.mark.parametrize("streams", [False, True])
async def test_blocks_are_thinking_text_and_calls(streams: bool) -> None:  # noqa: FBT001 - a parameter
    service = FakeService(saying(ALL), per_piece=3)
    asked: Any = {
        "model": "keeper",
        "max_tokens": 400,
        "messages": HELLO,
        "tools": [LOOK],
        "extra_body": THINKS,
    }

    async def reply_of(client: AsyncAnthropic) -> Message:
        if not streams:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    async with conversing(service) as client:
        reply = await reply_of(client)
        shown = [block.model_dump(exclude_none=True) for block in reply.content]
        assert [block["type"] for block in shown] == ["thinking", "text", "tool_use", "tool_use"]
        assert (shown[0]["thinking"], shown[1]["text"].strip()) == ("Hm.", "I shall look.")
        assert {(block["name"], str(block["input"])) for block in shown[2:]} == {
            ("look", "{'person': 'Emma'}")
        }
        assert len({block["id"] for block in shown[2:]}) == 2
        assert reply.stop_reason == "tool_use"
        assert reply.usage.output_tokens > 10


@pytest.mark.parametrize("arguments", ['{"a": "b', '{"a": b}', '{"a": 1e999}', '{"a": "\\ud800"}'])
async def test_arguments_that_are_none_are_a_text(arguments: str) -> None:
    written = f'<tool_call>\n{{"name": "look", "arguments": {arguments}'
    async with conversing(FakeService(saying(written))) as client:
        reply = await client.messages.create(model="keeper", max_tokens=400, messages=HELLO, tools=[LOOK])
        (block,) = reply.content
        assert isinstance(block, anthropic.types.ToolUseBlock)
        assert (block.name, block.input) == ("look", {"arguments": arguments})


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [({"max_tokens": 2}, "max_tokens", None), ({"stop_sequences": ["in the"]}, "stop_sequence", "in the")],
)
async def test_end_has_its_reason(fields: Any, reason: str, sequence: str | None) -> None:  # noqa: ANN401
    async with conversing(FakeService(saying("She is in the tower."))) as client:
        asked = {"model": "keeper", "max_tokens": 50, "messages": HELLO} | fields
        reply = await client.messages.create(**asked)
        assert (reply.stop_reason, reply.stop_sequence) == (reason, sequence)


def test_prompt_is_the_same_in_blocks_and_under_marks() -> None:
    blocks = [text("He", cache_control=EPHEMERAL), text("llo!")]
    assert turns() == turns(messages=[{"role": "user", "content": blocks}]) == [("user", "Hello!")]
    system = [text(BILLING), text("Be "), text("short.", cache_control=EPHEMERAL)]
    assert turns(system=system) == turns(system="Be short.") == turns(system=f"{BILLING}Be short.")
    marked = chat_of(
        messages=[{"role": "user", "content": blocks}], tools=[LOOK | {"cache_control": EPHEMERAL}]
    )
    assert [mark.chars for mark in marked.marks()] == [0, 2]


def test_old_turns_are_rendered() -> None:
    called = {"type": "tool_use", "id": "a", "name": "look", "input": {"name": "Emma"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    old: list[Any] = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            text("I look."),
            called,
            called | {"id": "b", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [text("Tower."), image]},
            {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": "gone"},
            {"type": "tool_result", "tool_use_id": "c"},
            {"type": "tool_result", "tool_use_id": "d", "content": [
                {"type": "search_result", "source": "u", "content": [text("Found.")]},
                {"type": "document", "source": {"type": "base64", "data": ""}},
            ]},
            text("So?"),
        ]},
        {"role": "assistant", "content": None},
        {"role": "system", "content": "Late."},
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "Paper."}}]},
    ]  # fmt: skip
    assert turns(messages=old) == [
        ("user", "Where?"),
        ("assistant", "I look."),
        ("tool", "Tower.[image: this model reads text alone]"),
        ("tool", "Error: gone"),
        ("tool", ""),
        ("tool", "Found.[document: this model reads text alone]"),
        ("user", "So?"),
        ("assistant", ""),
        ("system", "Late."),
        ("user", "Paper."),
    ]
    answered = chat_of(messages=old).messages[1]
    assert answered.reasoning_content == "Hm."
    assert [(made.id, made.function.arguments) for made in answered.tool_calls or []] == [
        ("a", {"name": "Emma"}),
        ("b", {}),
    ]


def test_fields_are_those_of_a_chat() -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    found = chat_of(
        tools=[LOOK, LOOK | {"name": "see", "type": None}, web],
        tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert [tool.function.name for tool in found.tools] == ["look", "see"]
    assert (found.tool_choice.name, found.parallel_tool_calls) == ("look", False)
    assert found.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert found.reasoning_effort == "high"
    assert found.response_format["type"] == "json_schema"
    odd = {"type": "\u65e5\r\na"}
    body = MessagesBody.model_validate({"messages": HELLO, "tools": [web, odd], "service_tier": "auto"})
    assert body.ignored() == ("service_tier",)
    assert body.hosted() == ["web_search_20250305", "\u65e5\r\na"]
    for kind, choice in {"auto": "auto", "any": "required", "none": "none"}.items():
        assert chat_of(tools=[LOOK], tool_choice={"type": kind}).tool_choice == choice
    continued = chat_of(messages=[*HELLO, {"role": "assistant", "content": "She"}])
    assert continued.continue_final_message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\].role: give user, assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]: give a text, or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\]: 'image' is not"),
        ({"tool_choice": {"type": "some"}}, "tool_choice: give"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        (
            {"thinking": {"type": "enabled"}, "extra_body": {"chat_template_kwargs": [1]}},
            "chat_template_kwargs",
        ),
    ],
)
async def test_bad_bodies_are_refused_in_the_shape_of_the_api(fields: Any, message: str) -> None:  # noqa: ANN401
    async with conversing(FakeService(saying("a"))) as client:
        asked = {"model": "keeper", "max_tokens": 9, "messages": HELLO} | fields
        with pytest.raises(anthropic.BadRequestError, match=message) as refused:
            await client.messages.create(**asked)
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "later",
    [
        [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Then read on."}],
        [{"role": "user", "content": [text("Then read on.")]}],
        [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]},
        ],
    ],
)
def test_image_of_an_earlier_turn_is_marked_and_a_new_one_refused(later: list[Any]) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    asked: list[Any] = [*HELLO, {"role": "user", "content": [text("See: "), image]}]
    assert turns(messages=[*asked, *later])[1] == ("user", "See: [image: this model reads text alone]")
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]}
    for new in (asked, [*asked, results]):
        with pytest.raises(RequestError, match=r"content\[1\]: 'image' is not supported: send text"):
            turns(messages=new)


async def test_errors_before_and_within_a_stream() -> None:
    service = FakeService(saying("She is in the tower."), fail_at=3, failure=Unserved("no worker is left"))
    async with conversing(service) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=9, messages=HELLO)
        with pytest.raises(anthropic.APIStatusError, match="no worker is left") as cut:
            async with client.messages.stream(model="keeper", max_tokens=9, messages=HELLO) as stream:
                await stream.get_final_message()
        assert isinstance(cut.value.body, dict)
        assert cut.value.body["error"]["type"] == "overloaded_error"


async def test_errors_of_models_are_in_the_shape_that_its_clients_read() -> None:
    async with conversing(FakeService(saying("a"))) as client:
        with pytest.raises(anthropic.NotFoundError) as refused:
            await client.models.retrieve("other")
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "not_found_error"


def test_errors_of_models_have_the_shape_of_openai_for_others() -> None:
    other = call(app_over(FakeService(saying("a"))), "GET", "/v1/models/other").json()
    assert other["error"]["code"] == "model_not_found"


async def test_models_are_as_its_clients_want_them() -> None:
    async with conversing(FakeService(saying("a"))) as client:
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.type, model.display_name, model.created_at.year) == (
            "keeper", "model", "keeper", 2023,
        )  # fmt: skip


def test_probe_of_its_clients_is_answered() -> None:
    assert call(app_over(FakeService(saying("a"))), "GET", "/api/hello").status_code == 200
