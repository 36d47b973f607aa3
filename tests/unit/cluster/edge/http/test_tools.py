"""Tools and reasoning of several families, with the `openai` SDK over a real socket: offered, called,
answered, forced."""

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from httpx import Response
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tests.support.cluster.fake_service import KEEPER, MODEL, FakeService, app_over, post
from tests.support.cluster.openai_talk import LOOK, conversing
from tests.support.workers.masks import accepts
from tidemill.cluster.edge.chat.formats import CALL_END, CHANNELS, FORMS, RETURN, THINKING
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer, text_of
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.messages import Grammar

Parsed = tuple[str, str, list[tuple[str, Any]]]
"""Reasoning, words, and calls."""

TEMPLATE = """{% for tool in tools or [] %}
{%- set f = tool.function %}[{{ f.name }} {{ (f.parameters or {}) | tojson }}]
{% endfor %}{% for m in messages %}<|{{ m.role }}|> {{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}{% if not loop.last or not open %}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if thinks %}<think>
{% else %}</think>{% endif %}{% endif %}"""
XML = TEMPLATE + "{# <function=name> #}"
TURNS = """{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"""
CHANNELED = f"""{{% if tools %}}{{{{ tools | length }}}} tools{{% endif %}}{TURNS}
{{%- if reasoning_effort %}} Reasoning: {{{{ reasoning_effort }}}}{{% endif %}}
{{%- if add_generation_prompt %}}<|start|>assistant{{% endif %}}{{# <|channel|> #}}"""
GPT_OSS = (CHANNELED, CHANNELS)
GRANITE = (
    "{% if tools %}<|tool_call|>{% endif %}{{ messages[0].content }}",
    FORMS["granite"].tags,
)
V31 = (
    "{{ tools }}{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}",
    THINKING["deepseek_v3"].tags,
)

PAD = 0
WAIT: ChatCompletionToolParam = {"type": "function", "function": {"name": "wait"}}
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where is Emma?"}]
EMMA = ("look", {"person": "Emma"})
SPACED = '<tool_call>\n{\n "name": "look", "arguments": {"person": "Emma"}}\n</tool_call>'
CALLING = '<tool_call>\n{"name": "look", "arguments": {"person": "Emma"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=look>\n<parameter=person>\nEmma\n</parameter>\n</function>\n</tool_call>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
COMMENTARY = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"person": "Emma"}'
GRANITES = 'So. <|tool_call|>[{"name": "look", "arguments": {"person": "Emma"}}]'
THOUGHT = "Hm.</think>\n\nShe is here."
THINKS: Any = {"extra_body": {"chat_template_kwargs": {"thinks": True}}}
JSON: Any = {"response_format": {"type": "json_object"}}
REGEX: Any = {"extra_body": {"structured_outputs": {"regex": "(?s)[A-Z].*"}}}
UNMARKED: Any = {"add_generation_prompt": False}
HIGH: Any = {"reasoning_effort": "high"}


@cache
def tokenizer(template: str = TEMPLATE, tags: tuple[str, ...] = ()) -> FolderTokenizer:
    """keeper's with a template that knows tools and reasoning, and with these special tokens."""
    with TemporaryDirectory() as folder:
        raw = RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))
        cast("Any", raw).add_special_tokens([AddedToken(tag, special=True) for tag in tags])
        raw.save(f"{folder}/tokenizer.json")
        shutil.copy(KEEPER / "tokenizer_config.json", folder)
        (Path(folder) / "chat_template.jinja").write_text(template)
        return load_tokenizer(Path(folder))


def saying(text: str, last: str = "", tokens: FolderTokenizer | None = None) -> FakeService:
    """Return a service that answers this text, then a token that ends it. keeper's own tags do not count
    here: `<|end|>` is a tag of other families."""
    tokens = tokens or tokenizer()
    answer = [*tokens.encode(text), tokens.added[last] if last else PAD]
    return FakeService(lambda _: answer, per_piece=2, model=replace(MODEL, eos_token_ids=(PAD,)))


def prompts_of(service: FakeService, tokens: FolderTokenizer | None = None) -> list[str]:
    return [text_of(tokens or tokenizer(), request.tokens) for request in service.requests]


def sent(
    service: FakeService,
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    tokens: FolderTokenizer | None = None,
) -> Response:
    """Send a body, a chat with the usual question."""
    asked = {"messages": ASKED} if path == "/v1/chat/completions" else {}
    return post(app_over(service, tokens=tokens or tokenizer()), path, {**asked, **body})


async def parsed(client: AsyncOpenAI, **options: Any) -> Parsed:  # noqa: ANN401 - as the SDK takes it
    """Return an answer, which is the same streamed and whole."""
    create = cast("Callable[..., Awaitable[Any]]", client.chat.completions.create)
    reply = await create(model="keeper", messages=ASKED, **options)
    message = reply.choices[0].message
    whole = [[call.function.name, call.function.arguments] for call in message.tool_calls or list[Any]()]
    reasoning, words, calls = "", "", list[list[str]]()
    async for chunk in await create(model="keeper", messages=ASKED, stream=True, **options):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", "")
        words += delta.content or ""
        for piece in delta.tool_calls or list[Any]():
            if piece.function.name:
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments or ""
    assert whole == calls
    assert (getattr(message, "reasoning_content", ""), message.content or "") == (reasoning, words)
    assert reply.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    return reasoning, words, [(name, json.loads(arguments)) for name, arguments in calls]


TOOLS: Any = {"tools": [LOOK, WAIT]}
FORCED: Any = {**TOOLS, "tool_choice": "required"}
ANSWERS: list[tuple[tuple[Any, ...], str, str, dict[str, Any], Parsed]] = [
    ((), f"{CALLING}\n{CALLING}", "", TOOLS, ("", "", [EMMA, EMMA])),
    ((), f"{CALLING}\n{CALLING}", "", {**TOOLS, "parallel_tool_calls": False}, ("", "", [EMMA])),
    ((), CALLING, "", {}, ("", CALLING, [])),
    ((), CALLING, "", {**TOOLS, "tool_choice": "none"}, ("", CALLING, [])),
    ((), THOUGHT, "", THINKS, ("Hm.", "She is here.", [])),
    ((), THOUGHT, "", {}, ("", THOUGHT, [])),
    ((), 'Hm.</think>\n\n{"a": 1}', "", {**JSON, **THINKS}, ("Hm.", '{"a": 1}', [])),
    ((), f"Hm.</think>\n\n{CALLING}", "", {**TOOLS, **JSON, **THINKS}, ("Hm.", "", [EMMA])),
    ((), "Hm.", "", {**JSON, **THINKS}, ("Hm.", "", [])),
    ((XML,), XML_CALL, "", TOOLS, ("", "", [EMMA])),
    ((XML,), XML_CALL, "", FORCED, ("", "", [EMMA])),
    (GPT_OSS, f"{ANALYSIS}{FINAL}She is here.", RETURN, TOOLS, ("Hm.", "She is here.", [])),
    (GPT_OSS, f"{ANALYSIS}{COMMENTARY}", CALL_END, TOOLS, ("Hm.", "", [EMMA])),
    (GPT_OSS, "She is here.", "", TOOLS, ("", "She is here.", [])),
    (GPT_OSS, f'{ANALYSIS}{FINAL}{{"a": 1}}', RETURN, JSON, ("Hm.", '{"a": 1}', [])),
    (GPT_OSS, COMMENTARY, CALL_END, FORCED, ("", "", [EMMA])),
    ((), CALLING, "", {**TOOLS, **JSON}, ("", "", [EMMA])),
    ((), '{"a": 1}', "", {**TOOLS, **JSON}, ("", '{"a": 1}', [])),
    ((), f"So: {CALLING}", "", {**TOOLS, **REGEX}, ("", f"So: {CALLING}", [])),
    ((), CALLING, "", {**TOOLS, **REGEX}, ("", "", [EMMA])),
    (GPT_OSS, COMMENTARY, CALL_END, {**TOOLS, **JSON}, ("", "", [EMMA])),
    (GPT_OSS, f'{FINAL}{{"a": 1}}', RETURN, {**TOOLS, **JSON}, ("", '{"a": 1}', [])),
    (GRANITE, GRANITES, "", TOOLS, ("", "So. ", [EMMA])),
    (GRANITE, GRANITES, "", {}, ("", GRANITES.replace("<|tool_call|>", ""), [])),
    (V31, "Hm.</think>Here.", "", {"reasoning_effort": "low"}, ("Hm.", "Here.", [])),
    (V31, "Hm.</think>Here.", "", {"reasoning_effort": "none"}, ("", "Hm.</think>Here.", [])),
]


@pytest.mark.parametrize(("family", "text", "last", "options", "expected"), ANSWERS)
async def test_answer_is_parsed_whole_and_streamed(
    family: tuple[Any, ...], text: str, last: str, options: dict[str, Any], expected: Parsed
) -> None:
    tokens = tokenizer(*family)
    service = saying(text, last, tokens)
    async with conversing(service, tokens) as client:
        assert await parsed(client, **options) == expected
    (first, _), request = prompts_of(service, tokens), service.requests[0]
    if not family[1:]:
        assert ("[look" in first) is ("tools" in options and options.get("tool_choice") != "none")
    if family == GPT_OSS:
        assert first.endswith("<|end|><|start|>assistant")
        assert {PAD, *(tokens.added[tag] for tag in (RETURN, CALL_END))} == set(request.stop_token_ids)
    if options is FORCED:
        begin = f"<[{tokens.added['<|message|>']}]>" if family == GPT_OSS else "<parameter=person>"
        assert begin in cast("Grammar", request.sampling.grammar).text


async def test_call_and_the_answer_to_it() -> None:
    service = saying(f"I shall look.\n{CALLING}")
    async with conversing(service, tokenizer()) as client:
        reply = await client.chat.completions.create(model="keeper", messages=ASKED, tools=[LOOK, WAIT])
        message = reply.choices[0].message
        answered: list[Any] = [
            *ASKED,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "in the tower"},
        ]
        await client.chat.completions.create(model="keeper", messages=answered, tools=[LOOK])
    first, second = prompts_of(service)
    assert '[look {"type": "object"' in first
    assert "[wait" in first
    assert 'I shall look.\n<tool_call>{"person": "Emma"}</tool_call>' in second, "arguments are an object"
    assert "<|tool|> in the tower" in second


async def test_streamed_call_in_two_answers() -> None:
    async with (
        conversing(saying(f"{CALLING}\n{CALLING}"), tokenizer()) as client,
        client.chat.completions.stream(model="keeper", messages=ASKED, tools=[LOOK], n=2) as stream,
    ):
        grown = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
        reply = await stream.get_final_completion()
    assert len(grown) > 3 * 4, "arguments come as they are written"
    calls: list[Any] = [call for choice in reply.choices for call in choice.message.tool_calls]
    assert [call.function.arguments for call in calls] == ['{"person": "Emma"}'] * 4
    assert len({call.id for call in calls}) == 4


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        ("required", [CALLING, f"{CALLING}\n{CALLING}"], ["no", CALLING.replace("Emma", "Bob"), SPACED]),
        ({"type": "function", "function": {"name": "look"}}, [CALLING], [f"{CALLING}\n{CALLING}"]),
        ({"type": "function", "function": {"name": "wait"}}, [], [CALLING]),
    ],
)
async def test_forced_call_follows_a_grammar(
    choice: Any,  # noqa: ANN401 - as the SDK takes it
    good: list[str],
    bad: list[str],
    *,
    thinks: bool,
) -> None:
    """The grammar accepts the right calls whole, and no other, whatever the model prefers."""
    service = saying(CALLING)
    async with conversing(service, tokenizer()) as client:
        options: Any = THINKS if thinks else {}
        await client.chat.completions.create(
            model="keeper", messages=ASKED, tools=[LOOK, WAIT], tool_choice=choice, **options
        )
    grammar = cast("Grammar", service.requests[0].sampling.grammar)
    for text in (*good, *bad):
        tokens = tokenizer().encode(f"</think>\n\n{text}" if thinks else text)
        matcher = Grammars(KEEPER, 896, {PAD}).matcher(grammar)
        assert accepts(matcher, [*tokens, PAD]) is (text in good), text


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (THINKS["extra_body"], ["Hm.</think>\n\n{}", "</think>{}"], ["{}", "Hm.{}"]),
        ({}, ["{}"], ["Hm.</think>{}", "<think>Hm.</think>{}"]),
        (UNMARKED, ["{}"], ["<think>Hm.</think>{}", "Hm.</think>{}"]),
        (UNMARKED | HIGH, ["{}", "<think>Hm.</think>{}", "<think></think>\n\n{}"], ["Hm.</think>{}"]),
        (UNMARKED | {"reasoning_effort": "none"}, ["{}"], ["<think>Hm.</think>{}"]),
        ({"continue_final_message": True}, ["{}"], ["<think>Hm.</think>{}"]),
        (TOOLS, ["{}", CALLING], [CALLING.replace("Emma", "Bob"), CALLING.replace("look", "leave"), "So"]),
        (TOOLS | UNMARKED | HIGH, [CALLING, f"<think>Hm.</think>\n\n{CALLING}"], [f"<think>{CALLING}"]),
        (TOOLS | {"parallel_tool_calls": False}, [CALLING], [f"{CALLING}\n{CALLING}"]),
    ],
)
def test_constraint_applies_behind_the_thought(
    fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    service = saying("{}")
    reply = sent(service, {**JSON, **fields})
    assert reply.status_code == 200, reply.text
    grammar = cast("Grammar", service.requests[0].sampling.grammar)
    for text in (*good, *bad):
        matcher = Grammars(KEEPER, 896, {PAD}).matcher(grammar)
        assert accepts(matcher, [*tokenizer().encode(text), PAD]) is (text in good), text


@pytest.mark.parametrize(("effort", "expected"), [("high", " Reasoning: high"), ("none", ""), (None, "")])
async def test_template_gets_the_effort(effort: str | None, expected: str) -> None:
    tokens = tokenizer(*GPT_OSS)
    service = saying(f"{FINAL}a", RETURN, tokens)
    async with conversing(service, tokens) as client:
        await parsed(client, reasoning_effort=effort)
    assert prompts_of(service, tokens)[0].endswith(f"<|end|>{expected}<|start|>assistant")


async def test_last_message_goes_on() -> None:
    service = saying(" the tower.")
    async with conversing(service, tokenizer()) as client:
        await client.chat.completions.create(
            model="keeper",
            messages=[*ASKED, {"role": "assistant", "content": "Emma is in"}],
            extra_body={"continue_final_message": True, "chat_template_kwargs": {"open": True}},
        )
    assert prompts_of(service)[0].endswith("Emma is in")


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "structured_outputs, guided_regex"),
    ],
)
def test_forced_call_goes_before_what_else_restricts_the_answer(
    fields: dict[str, Any], ignored: str | None
) -> None:
    service = saying(CALLING)
    reply = sent(service, {"tools": [LOOK], "tool_choice": "required", **fields})
    assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert reply.headers.get("x-tidemill-ignored") == ignored


@pytest.mark.parametrize(("mode", "forced"), [("auto", False), ("required", True)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_allowed_tools_are_those_that_are_shown(mode: str, path: str, *, forced: bool) -> None:
    service = saying(CALLING)
    names, flat = [{"type": "function", "name": "look"}], path.endswith("responses")
    nested = {"mode": mode, "tools": [{"type": "function", "function": {"name": "look"}}]}
    choice = {"mode": mode, "tools": names} if flat else {"allowed_tools": nested}
    tools: list[Any] = [LOOK, WAIT]
    body: dict[str, Any] = {
        **({"input": "a"} if flat else {}),
        "tools": [{"type": "function", **tool["function"]} for tool in tools] if flat else tools,
        "tool_choice": {"type": "allowed_tools", **choice},
    }
    assert sent(service, body, path).status_code == 200
    (prompt,), request = prompts_of(service), service.requests[0]
    assert ("[look" in prompt, "[wait" in prompt) == (True, False)
    assert (request.sampling.grammar is not None) is forced


@pytest.mark.parametrize("stop", ["", [""], ["nowhere", "", "elsewhere", "a b", "c d", "e f"]])
def test_empty_and_many_stop_strings_are_taken(stop: object) -> None:
    reply = sent(saying("She is here."), {"prompt": "a", "stop": stop}, "/v1/completions")
    assert reply.json()["choices"][0]["text"] == "She is here."


def test_special_tokens_are_shown_where_they_are_wanted() -> None:
    tokens = tokenizer(*GRANITE)
    service = saying("a<|tool_call|>b", "", tokens)
    for skips, text in ((True, "ab"), (False, "a<|tool_call|>b")):
        reply = sent(service, {"prompt": "a", "skip_special_tokens": skips}, "/v1/completions", tokens)
        assert reply.json()["choices"][0]["text"] == text


def test_what_a_call_cannot_enforce_is_named() -> None:
    service = saying(CALLING)
    wanted = {"properties": {"at": {"type": "string", "format": "path"}}}
    parameters = {"type": ["object", "null"], **wanted}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters, "strict": False}}
    reply = sent(service, {"tools": [tool], "tool_choice": "required"})
    assert reply.headers["x-tidemill-ignored"] == "tools.look.parameters.properties.at.format"
    grammar = service.requests[0].sampling.grammar
    assert grammar is not None
    assert '"type": "object"' in grammar.text
    assert "path" not in grammar.text


@pytest.mark.parametrize("count", range(1, 40))
def test_forced_call_that_is_cut_leaks_no_tag(count: int) -> None:
    body = {"tools": [LOOK], "tool_choice": "required", "max_tokens": count, **THINKS["extra_body"]}
    reply = sent(saying(f"</think>\n\n{CALLING}"), body)
    assert not reply.json()["choices"][0]["message"]["content"]
