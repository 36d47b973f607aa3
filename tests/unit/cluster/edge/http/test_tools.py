"""Tools and reasoning, with the `openai` SDK over a real socket: offered, called, answered, forced."""

import json
import shutil
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.support.cluster.fake_service import EOS, KEEPER, FakeService, saying
from tests.support.cluster.openai_talk import LOOK, converse
from tests.support.workers.masks import allowed
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.messages import Request

TEMPLATE = """{% for tool in tools or [] %}
{%- set f = tool.function %}[{{ f.name }} {{ (f.parameters or {}) | tojson }}]
{% endfor %}{% for m in messages %}<|{{ m.role }}|> {{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}{% if not loop.last or not open %}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if thinks %}<think>
{% else %}</think>{% endif %}{% endif %}"""

WAIT: ChatCompletionToolParam = {"type": "function", "function": {"name": "wait"}}
LARGE = {"type": "function", "function": {"name": "f", "parameters": {"title": "a" * 70_000}}}
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where is Emma?"}]
SPACED = '<tool_call>\n{\n "name": "look", "arguments": {"person": "Emma"}}\n</tool_call>'
CALLING = '<tool_call>\n{"name": "look", "arguments": {"person": "Emma"}}\n</tool_call>'


@cache
def tokenizer(template: str = TEMPLATE) -> FolderTokenizer:
    """keeper's, with a template that knows tools and reasoning."""
    with TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(KEEPER / name, folder)
        (Path(folder) / "chat_template.jinja").write_text(template)
        return load_tokenizer(Path(folder))


def prompt_of(request: Request) -> str:
    return b"".join(map(tokenizer().piece, request.tokens)).decode()


def ask(
    service: FakeService,
    talk: Callable[[AsyncOpenAI], Awaitable[None]],
    tokens: FolderTokenizer | None = None,
) -> None:
    converse(service, talk, tokens or tokenizer())


def test_call_and_the_answer_to_it() -> None:
    service = FakeService(saying(f"I shall look.\n{CALLING}"))

    async def talk(client: AsyncOpenAI) -> None:
        reply = await client.chat.completions.create(model="keeper", messages=ASKED, tools=[LOOK, WAIT])
        (choice,) = reply.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I shall look.\n")
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"person": "Emma"})
        answered: list[Any] = [
            *ASKED,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "in the tower"},
        ]
        await client.chat.completions.create(model="keeper", messages=answered, tools=[LOOK])

    ask(service, talk)
    first, second = map(prompt_of, service.requests)
    assert '[look {"type": "object"' in first
    assert "[wait" in first
    assert '<tool_call>{"person": "Emma"}</tool_call>' in second, "arguments reach the template as an object"
    assert "<|tool|> in the tower" in second


XML_CALL = "<tool_call>\n<function=look>\n<parameter=person>\nEmma\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_template_that_asks_for_xml_gets_calls_in_xml(choice: Any) -> None:  # noqa: ANN401 - as the SDK takes it
    service = FakeService(saying(XML_CALL), per_piece=3)

    async def talk(client: AsyncOpenAI) -> None:
        reply = await client.chat.completions.create(
            model="keeper", messages=ASKED, tools=[LOOK], tool_choice=choice
        )
        (call,) = reply.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"person": "Emma"})

    ask(service, talk, tokenizer(TEMPLATE + "{# <function=name> #}"))
    grammar = service.requests[0].sampling.grammar
    assert (grammar is None) is (choice == "auto")
    assert grammar is None or "<parameter=person>" in grammar.text


def test_streamed_call_in_two_answers() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        async with client.chat.completions.stream(
            model="keeper", messages=ASKED, tools=[LOOK], n=2, parallel_tool_calls=True
        ) as stream:
            grown = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            reply = await stream.get_final_completion()
        assert len(grown) > 3 * 4, "arguments come as they are written"
        ids: set[str] = set()
        for choice in reply.choices:
            assert choice.finish_reason == "tool_calls"
            calls = choice.message.tool_calls or []
            assert [call.function.arguments for call in calls] == ['{"person": "Emma"}'] * 2
            ids |= {call.id for call in calls}
        assert len(ids) == 4

    ask(FakeService(saying(f"{CALLING}\n{CALLING}"), per_piece=3), talk)


def test_one_call_alone_where_several_are_not_wanted() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        reply = await client.chat.completions.create(
            model="keeper", messages=ASKED, tools=[LOOK], parallel_tool_calls=False
        )
        assert len(reply.choices[0].message.tool_calls or []) == 1

    ask(FakeService(saying(f"{CALLING}\n{CALLING}")), talk)


@pytest.mark.parametrize("options", [{}, {"tools": [LOOK], "tool_choice": "none"}])
def test_without_tools_a_call_is_words(options: dict[str, Any]) -> None:
    service = FakeService(saying(CALLING))

    async def talk(client: AsyncOpenAI) -> None:
        reply = await client.chat.completions.create(model="keeper", messages=ASKED, extra_body=options)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (CALLING, "stop")

    ask(service, talk)
    assert "[look" not in prompt_of(service.requests[0])


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        ("required", [CALLING, f"{CALLING}\n{CALLING}"], ["no", CALLING.replace("Emma", "Bob"), SPACED]),
        ({"type": "function", "function": {"name": "look"}}, [CALLING], [f"{CALLING}\n{CALLING}"]),
        ({"type": "function", "function": {"name": "wait"}}, [], [CALLING]),
    ],
)
def test_forced_call_follows_a_grammar(
    choice: Any,  # noqa: ANN401 - as the SDK takes it
    good: list[str],
    bad: list[str],
    *,
    thinks: bool,
) -> None:
    """The grammar accepts the right calls whole, and no other, whatever the model prefers."""
    service = FakeService(saying(CALLING))

    async def talk(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(
            model="keeper",
            messages=ASKED,
            tools=[LOOK, WAIT],
            tool_choice=choice,
            extra_body={"chat_template_kwargs": {"thinks": thinks}},
        )

    ask(service, talk)
    grammar = service.requests[0].sampling.grammar
    assert grammar is not None
    start = "</think>\n\n" if thinks else ""
    for text in (*good, *bad):
        matcher = Grammars(KEEPER, 896, {EOS}).matcher(grammar)
        tokens = [*tokenizer().encode(start + text), EOS]
        taken = 0
        for token in tokens:
            if not allowed(matcher)[token]:
                break
            matcher.push(token)
            taken += 1
        assert (taken == len(tokens)) is (text in good), text


def test_reasoning_is_separated() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        for thinks in (True, False):
            asked: Any = {"chat_template_kwargs": {"thinks": thinks}}
            reply = await client.chat.completions.create(model="keeper", messages=ASKED, extra_body=asked)
            message = reply.choices[0].message
            reasoning = (message.model_extra or {}).get("reasoning_content")
            expected = ("Hm.", "She is here.") if thinks else (None, "Hm.</think>\n\nShe is here.")
            assert (reasoning, message.content) == expected
            streamed = ["", ""]
            async for chunk in await client.chat.completions.create(
                model="keeper", messages=ASKED, extra_body=asked, stream=True
            ):
                delta = chunk.choices[0].delta
                streamed[0] += (delta.model_extra or {}).get("reasoning_content") or ""
                streamed[1] += delta.content or ""
            assert (streamed[0] or None, streamed[1]) == expected

    ask(FakeService(saying("Hm.</think>\n\nShe is here."), per_piece=2), talk)


def test_structured_answer_is_no_reasoning() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        reply = await client.chat.completions.create(
            model="keeper",
            messages=ASKED,
            response_format={"type": "json_object"},
            extra_body={"chat_template_kwargs": {"thinks": True}},
        )
        assert reply.choices[0].message.content == '{"a": 1}'

    ask(FakeService(saying('{"a": 1}')), talk)


def test_last_message_goes_on() -> None:
    service = FakeService(saying(" the tower."))

    async def talk(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(
            model="keeper",
            messages=[*ASKED, {"role": "assistant", "content": "Emma is in"}],
            extra_body={"continue_final_message": True, "chat_template_kwargs": {"open": True}},
        )

    ask(service, talk)
    assert prompt_of(service.requests[0]).endswith("Emma is in")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [LOOK] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [LOOK], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (
            {"tools": [LOOK], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tools": [LARGE], "tool_choice": "required"}, "tools"),
    ],
)
def test_unsupported_fields_are_named(fields: dict[str, Any], param: str) -> None:
    service = FakeService(saying("a"))

    async def talk(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="keeper", messages=ASKED, extra_body=fields)
        assert refused.value.param == param

    ask(service, talk)
    assert not service.requests
