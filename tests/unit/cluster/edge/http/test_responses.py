"""/v1/responses with the `openai` SDK over a real socket: text, reasoning, calls, streams, refusals."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import FunctionToolParam, Response
from pydantic import BaseModel

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tests.support.cluster.openai_talk import ARGUMENTS, conversing
from tests.unit.cluster.edge.http.test_tools import CALLING, TEMPLATE, prompts_of, tokenizer
from tidemill.cluster.edge.apis.responses_body import ResponsesBody
from tidemill.cluster.edge.apis.responses_events import Output
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text
from tidemill.workers.messages import Unserved

PATH = "/v1/responses"
LOOK: FunctionToolParam = {
    "type": "function",
    "name": "look",
    "description": "Looks for a person.",
    "parameters": ARGUMENTS,
    "strict": True,
}
THINKS: Any = {"chat_template_kwargs": {"thinks": True}}
ALL = f"Hm.</think>\n\nI shall look.\n{CALLING}\n{CALLING}"


class Person(BaseModel):
    name: str
    age: int


async def test_text_is_answered() -> None:
    service = FakeService(saying("She is in the tower."))
    async with conversing(service, tokenizer()) as client:
        reply = await client.responses.create(
            model="keeper",
            input="Where is Emma?",
            instructions="Be short.",
            max_output_tokens=60,
            temperature=0.5,
            store=True,
            metadata={"a": "b"},
            reasoning={"effort": "low"},
            extra_body={"seed": 3, "cache_salt": "abc", "top_k": 4},
        )
        assert (reply.output_text, reply.status, reply.error) == ("She is in the tower.", "completed", None)
        assert (reply.instructions, reply.temperature, reply.metadata) == ("Be short.", 0.5, {"a": "b"})
        assert reply.id.startswith("resp_")
        assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
        assert reply.usage.input_tokens_details.cached_tokens > 0
        assert reply.usage.output_tokens_details.reasoning_tokens == 0
    (request,) = service.requests
    assert prompts_of(service)[0].startswith("<|system|> Be short.<|end|>\n<|user|> Where is Emma?<|end|>")
    assert (request.max_new_tokens, request.sampling.temperature, request.sampling.top_k) == (60, 0.5, 4)


async def test_answer_that_is_cut_is_incomplete() -> None:
    asked: Any = {"model": "keeper", "input": "Hello!", "max_output_tokens": 2}
    async with conversing(FakeService(saying("She is in the tower.")), tokenizer()) as client:
        reply = await client.responses.create(**asked)
        *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
    assert reply.status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert [(item.type, item.status) for item in reply.output] == [("message", "incomplete")]
    assert last.type == "response.incomplete"


async def test_call_and_the_answer_to_it() -> None:
    service = FakeService(saying(f"I shall look.\n{CALLING}"))
    async with conversing(service, tokenizer()) as client:
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Where is Emma?"}]}]
        reply = await client.responses.create(model="keeper", input=asked, tools=[LOOK])
        message, called = reply.output
        assert message.type == "message"
        assert called.type == "function_call"
        assert (called.name, json.loads(called.arguments)) == ("look", {"person": "Emma"})
        output: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "in the tower"}
        text_of: list[Any] = [item.model_dump() for item in reply.output]
        reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None}
        await client.responses.create(
            model="keeper", input=[*asked, reasoning, *text_of, output], tools=[LOOK]
        )
        forced: tuple[Any, ...] = ("required", {"type": "function", "name": "look"})
        for choice in forced:
            reply = await client.responses.create(
                model="keeper", input="Look!", tools=[LOOK], tool_choice=choice
            )
            assert reply.model_dump()["tool_choice"] == choice
    grammars = [request.sampling.grammar for request in service.requests]
    assert [grammar is None for grammar in grammars] == [True, True, False, False]
    last = prompts_of(service)[1]
    assert "[look {" in last
    assert 'I shall look.\n<tool_call>{"person": "Emma"}</tool_call>' in last
    assert "<|tool|> in the tower" in last
    assert last.count("<|assistant|>") == 2, "words and calls of the assistant are one turn"


async def test_structured_output_is_parsed() -> None:
    service = FakeService(saying('{"name": "Emma", "age": 7}'))
    async with conversing(service, tokenizer()) as client:
        reply = await client.responses.parse(model="keeper", input="Who?", text_format=Person)
        assert reply.output_parsed == Person(name="Emma", age=7)
        async with client.responses.stream(model="keeper", input="Who?", text_format=Person) as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_parsed == Person(name="Emma", age=7)
        await client.responses.create(model="keeper", input="?", text={"format": {"type": "json_object"}})
    grammars = [request.sampling.grammar for request in service.requests]
    assert [grammar and grammar.kind for grammar in grammars] == ["json_schema", "json_schema", "json_object"]


@pytest.mark.parametrize("per_piece", [1, 2, 5, 100])
async def test_stream_has_the_content_of_a_whole_response(per_piece: int) -> None:
    service = FakeService(saying(ALL), per_piece=per_piece)
    async with conversing(service, tokenizer()) as client:
        asked: Any = {"model": "keeper", "input": "Where is Emma?", "tools": [LOOK], "extra_body": THINKS}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events: list[Any] = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-1] == "response.completed"
        called = ("function_call", '{"person": "Emma"}')
        expected = [("reasoning", "Hm."), ("message", "I shall look.\n"), called, called]
        assert outputs_of(final) == outputs_of(whole) == expected
        streamed = [""] * 4
        for event in events:
            if event.type.endswith(".delta"):
                streamed[event.output_index] += event.delta
        assert streamed == [text for _, text in outputs_of(whole)]
        assert whole.usage.output_tokens_details.reasoning_tokens > 0 or per_piece == 100
        assert len({item.model_dump()["call_id"] for item in whole.output[2:]}) == 2


def outputs_of(response: Response) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.arguments))
        else:
            content: Any = item.model_dump()["content"]
            found.append((item.type, "".join(part["text"] for part in content)))
    return found


async def test_failure_before_the_first_event_is_a_reply_and_later_an_event() -> None:
    service = FakeService(saying("a b c"), fail_at=0, failure=Unserved("no worker is left"))
    async with conversing(service, tokenizer()) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model="keeper", input="Hello!", stream=stream)
        service.fail_at = 2
        stream = await client.responses.create(model="keeper", input="a", stream=True)
        events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert "no worker is left" in events[-1].response.error.message
    assert events[-1].sequence_number == len(events) - 1


def test_fields_of_chats_are_ignored() -> None:
    service = FakeService(saying("a"))
    chats: dict[str, Any] = {"n": 3, "logprobs": True, "max_tokens": 1, "messages": [], "truncation": "auto"}
    reply = call(
        app_over(service, tokens=tokenizer()), "POST", PATH, json={"input": "Hello!", **chats}
    ).json()
    (request,) = service.requests
    assert request.sampling.logprobs is None
    assert request.max_new_tokens > 1
    assert len(reply["output"]) == 1


def test_no_effort_is_a_variable_of_the_template() -> None:
    assert "enable_thinking" not in TEMPLATE
    service = FakeService(saying("a"))
    body = {"input": "Hello!", "reasoning": {"effort": "none"}, "chat_template_kwargs": {"thinks": True}}
    assert call(app_over(service, tokens=tokenizer()), "POST", PATH, json=body).status_code == 200
    assert prompts_of(service)[0].endswith("<think>\n"), "the client's own headers are kept"


parts = st.lists(
    st.builds(ReasoningText, st.text(min_size=1, max_size=3))
    | st.builds(Text, st.text(min_size=1, max_size=3))
    | st.builds(Call, st.integers(0, 9), st.just("f"), st.just("{}")),
    max_size=8,
)


@settings(deadline=None)
@given(parts, st.integers(1, 3))
def test_items_open_and_close_in_their_order(parts: list[Part], at_once: int) -> None:
    output = Output("x")
    events = [
        event
        for start in range(0, len(parts), at_once)
        for event in output.add(parts[start : start + at_once])
    ]
    events += output.end("completed")
    added = [sent for sent in events if sent["type"] == "response.output_item.added"]
    done = [sent["item"] for sent in events if sent["type"] == "response.output_item.done"]
    assert done == output.items
    assert [sent["output_index"] for sent in added] == list(range(len(done)))
    assert len({str(item["id"]) for item in output.items}) == len(output.items) >= 1
    opened = -1
    for sent in events:
        if sent["type"] == "response.output_item.added":
            opened += 1
        assert sent["output_index"] == opened, "one item is open at a time"


SPACE: Any = {"type": "namespace", "name": "mcp__house", "tools": [LOOK]}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_tools_of_agents_are_offered_and_called_by_their_own_names() -> None:
    written = called("mcp__house__look", '{"person": "Emma"}') + called("apply_patch", '{"input": "a\\nb"}')
    service = FakeService(saying(written), per_piece=2)
    asked: Any = {"model": "keeper", "input": "Go.", "tools": [SPACE, PATCH, {"type": "web_search"}]}
    async with conversing(service, tokenizer()) as client:
        found = await client.responses.with_raw_response.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert found.headers["x-tidemill-ignored"] == "tools.web_search"
    whole = found.parse()
    look, patch = whole.output
    assert (look.type, look.name, look.namespace) == ("function_call", "look", "mcp__house")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "a\nb")
    streamed = events[-1].response.output
    assert [item.to_dict() | {"id": "", "call_id": ""} for item in streamed] == [
        item.to_dict() | {"id": "", "call_id": ""} for item in whole.output
    ]
    kinds = [event.type for event in events]
    assert kinds.count("response.custom_tool_call_input.done") == kinds.count("response.output_item.done") - 1
    offered = prompts_of(service)[0]
    assert "mcp__house__look" in offered
    assert "web_search" not in offered


@pytest.mark.parametrize("written", ['{"input": "\\ud800"}', '{"other": 1}'])
async def test_custom_call_without_a_text_keeps_what_the_model_wrote(written: str) -> None:
    service = FakeService(saying(called("apply_patch", written)))
    asked: Any = {"model": "keeper", "input": "Go.", "tools": [PATCH]}
    async with conversing(service, tokenizer()) as client:
        (patch,) = (await client.responses.create(**asked)).output
    assert (patch.type, patch.input) == ("custom_tool_call", written)


def test_calls_of_all_kinds_are_replayed() -> None:
    items: list[Any] = [
        {
            "type": "function_call",
            "call_id": "a",
            "namespace": "mcp__house",
            "name": "look",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
        {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": {"status": 0}},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "compaction", "encrypted_content": "x"},
        {"role": "user", "content": "So?"},
    ]
    turns = ResponsesBody.model_validate({"input": items}).chat().messages
    assert [(turn.role, turn.content) for turn in turns if turn.role != "assistant"] == [
        ("tool", "[image: this model reads text alone]"),
        ("tool", "done"),
        ("tool", '{"status": 0}'),
        ("user", "So?"),
    ]
    made = [call.function for turn in turns for call in turn.tool_calls or []]
    assert [(call.name, call.arguments) for call in made] == [
        ("mcp__house__look", {}),
        ("apply_patch", {"input": "x"}),
        ("local_shell", {"command": ["ls"]}),
    ]


@pytest.mark.parametrize(("headers", "status"), [({"upgrade": "websocket"}, 426), ({}, 405)])
def test_socket_is_refused_in_words_of_its_own(headers: dict[str, str], status: int) -> None:
    assert call(app_over(FakeService(saying("a"))), "GET", PATH, headers=headers).status_code == status
