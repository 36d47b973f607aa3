"""Models of other families behind the endpoint: tags that are special tokens, and answers in channels."""

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tests.support.cluster.fake_service import KEEPER, MODEL, FakeService
from tests.support.cluster.openai_talk import LOOK, converse
from tidemill.cluster.edge.chat.formats import CALL_END, CHANNELS, FORMS, RETURN, THINKING
from tidemill.cluster.edge.chat.text import text_of
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer

Parsed = tuple[str, str, list[tuple[str, Any]]]
"""Reasoning, words, and calls."""

PAD = 0
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where is Emma?"}]
TURNS = """{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"""
GPT_OSS = f"""{{% if tools %}}{{{{ tools | length }}}} tools{{% endif %}}{TURNS}
{{%- if reasoning_effort %}} Reasoning: {{{{ reasoning_effort }}}}{{% endif %}}
{{%- if add_generation_prompt %}}<|start|>assistant{{% endif %}}{{# <|channel|> #}}"""
GRANITE = "{% if tools %}<|tool_call|>{% endif %}{{ messages[0].content }}"
V31 = "{{ tools }}{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALLING = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"person": "Emma"}'


@cache
def tokenizer(template: str, tags: tuple[str, ...]) -> FolderTokenizer:
    """keeper's with these special tokens."""
    with TemporaryDirectory() as folder:
        raw = RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))
        cast("Any", raw).add_special_tokens([AddedToken(tag, special=True) for tag in tags])
        raw.save(f"{folder}/tokenizer.json")
        shutil.copy(KEEPER / "tokenizer_config.json", folder)
        (Path(folder) / "chat_template.jinja").write_text(template)
        return load_tokenizer(Path(folder))


def gpt_oss() -> FolderTokenizer:
    return tokenizer(GPT_OSS, CHANNELS)


def saying(tokens: FolderTokenizer, text: str, last: str = "", *, per_piece: int = 1) -> FakeService:
    """Return a service that answers this text, then a token that ends it. keeper's own tags do not count
    here: `<|end|>` is a tag of other families."""
    end = tokens.added[last] if last else PAD
    model = replace(MODEL, eos_token_ids=(PAD,))
    return FakeService(lambda _: [*tokens.encode(text), end], per_piece=per_piece, model=model)


def ask(
    service: FakeService, talk: Callable[[AsyncOpenAI], Awaitable[None]], tokens: FolderTokenizer
) -> list[str]:
    """The prompts that come of it."""
    converse(service, talk, tokens)
    return [text_of(tokens, request.tokens) for request in service.requests]


async def answer_of(client: AsyncOpenAI, **options: Any) -> Parsed:  # noqa: ANN401 - as the SDK takes it
    """Streamed and whole alike."""
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


ANSWERS: list[tuple[str, str, Parsed]] = [
    (f"{ANALYSIS}<|channel|>final<|message|>She is here.", RETURN, ("Hm.", "She is here.", [])),
    (f"{ANALYSIS}{CALLING}", CALL_END, ("Hm.", "", [("look", {"person": "Emma"})])),
    ("She is here.", "", ("", "She is here.", [])),
]


@pytest.mark.parametrize(("text", "last", "expected"), ANSWERS)
def test_answer_in_channels(text: str, last: str, expected: Parsed) -> None:
    service = saying(gpt_oss(), text, last, per_piece=2)

    async def talk(client: AsyncOpenAI) -> None:
        assert await answer_of(client, tools=[LOOK]) == expected

    prompt, _ = ask(service, talk, gpt_oss())
    assert prompt.endswith("<|end|><|start|>assistant")
    ends = [gpt_oss().added[tag] for tag in (RETURN, CALL_END)]
    assert {PAD, *ends} == set(service.requests[0].stop_token_ids), "the tags that end an answer"


def test_structured_answer_is_the_final_message() -> None:
    service = saying(gpt_oss(), '{"a": 1}', RETURN)

    async def talk(client: AsyncOpenAI) -> None:
        asked: Any = {"response_format": {"type": "json_object"}}
        assert await answer_of(client, **asked) == ("", '{"a": 1}', [])

    for prompt in ask(service, talk, gpt_oss()):
        assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>")


def test_forced_call_in_channels() -> None:
    service = saying(gpt_oss(), CALLING, CALL_END)

    async def talk(client: AsyncOpenAI) -> None:
        assert await answer_of(client, tools=[LOOK], tool_choice="required") == (
            "",
            "",
            [("look", {"person": "Emma"})],
        )

    ask(service, talk, gpt_oss())
    grammar = service.requests[0].sampling.grammar
    assert grammar is not None
    assert f"<[{gpt_oss().added['<|message|>']}]>" in grammar.text
    assert "commentary to=functions." in grammar.text


@pytest.mark.parametrize(("effort", "expected"), [("high", " Reasoning: high"), ("none", ""), (None, "")])
def test_template_gets_the_effort(effort: str | None, expected: str) -> None:
    service = saying(gpt_oss(), "<|channel|>final<|message|>a", RETURN)

    async def talk(client: AsyncOpenAI) -> None:
        await answer_of(client, reasoning_effort=effort)

    assert ask(service, talk, gpt_oss())[0].endswith(f"<|end|>{expected}<|start|>assistant")


def test_special_tokens_before_a_part_are_not_lost() -> None:
    tokens = tokenizer(GRANITE, FORMS["granite"].tags)
    text = 'So. <|tool_call|>[{"name": "look", "arguments": {"person": "Tom"}}]'
    service = saying(tokens, text, per_piece=3)

    async def talk(client: AsyncOpenAI) -> None:
        assert await answer_of(client, tools=[LOOK]) == ("", "So. ", [("look", {"person": "Tom"})])
        _, words, calls = await answer_of(client)
        assert (words, calls) == (text.replace("<|tool_call|>", ""), []), "no one waits for calls"

    ask(service, talk, tokens)


@pytest.mark.parametrize(
    ("effort", "expected"), [("low", ("Hm.", "Here.")), ("none", ("", "Hm.</think>Here."))]
)
def test_reasoning_that_the_template_has_begun(effort: str, expected: tuple[str, str]) -> None:
    tokens = tokenizer(V31, THINKING["deepseek_v3"].tags)
    service = saying(tokens, "Hm.</think>Here.")

    async def talk(client: AsyncOpenAI) -> None:
        assert await answer_of(client, reasoning_effort=effort) == (*expected, [])

    ask(service, talk, tokens)
