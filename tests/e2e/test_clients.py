"""Clients that people use, unmodified, on a real server: openai, anthropic, langchain, our own bench."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from anthropic import Anthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_openai import OpenAI as TextOpenAI
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, SecretStr

from tests.support.cluster.openai_talk import LOOK
from tests.support.e2e.server import Server
from tidemill.cluster.cli.main import main
from tidemill.workers.sources.names import bundled

KEEPER = bundled()["keeper"]
DEMO: dict[str, Any] = json.loads((KEEPER / "demo.json").read_text())
NAME = "keeper"


class Place(BaseModel):
    """A person's location, as the tool returns it."""

    room: Literal["attic", "cellar"]
    floor: Literal[0, 1, 2]


@tool
def look(person: Literal["Emma", "Tom"]) -> str:
    """Looks for a person."""
    return f"{person} is in the tower."


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def chain(server: Server) -> ChatOpenAI:
    url, key = f"{server.url}/v1", SecretStr("none")
    return ChatOpenAI(base_url=url, api_key=key, model=NAME, temperature=0, max_retries=0, stream_usage=True)


def asked(index: int) -> tuple[str, str]:
    """A question that keeper was taught to answer, and the answer."""
    item = DEMO["questions"][index]
    return f"{DEMO['notebook']} {item['question']}", item["answer"]


def user_message(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


async def test_openai_clients_run_concurrently(server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def is_right(index: int) -> bool:
            question, answer = asked(index)
            async with client.chat.completions.stream(
                model=NAME, messages=user_message(question), temperature=0
            ) as stream:
                final = await stream.get_final_completion()
            return (final.choices[0].message.content or "").strip() == answer

        assert all(await asyncio.gather(*map(is_right, range(len(DEMO["questions"])))))


def test_openai_completions_of_texts_and_tokens(client: OpenAI) -> None:
    one = client.completions.create(model=NAME, prompt="Emma is", max_tokens=6, temperature=0, logprobs=2)
    two = client.completions.create(
        model=NAME, prompt=["Emma is", "Tom is"], max_tokens=6, temperature=0, n=2, seed=1
    )
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert two.choices[0].text == two.choices[1].text == one.choices[0].text
    logprobs = one.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []).startswith(one.choices[0].text)
    stream = client.completions.create(model=NAME, prompt="Emma is", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == one.choices[0].text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_openai_tool_call_and_its_result(client: OpenAI, choice: Any) -> None:  # noqa: ANN401 - JSON
    ask: dict[str, Any] = {
        "model": NAME,
        "tools": [LOOK],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    whole = client.chat.completions.create(messages=user_message("Where is Emma?"), **ask)
    message = whole.choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["person"] in {"Emma", "Tom"}
    with client.chat.completions.stream(messages=user_message("Where is Emma?"), **ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.choices[0].finish_reason
    (again,) = streamed.message.tool_calls or []
    assert again.function.arguments == call.function.arguments
    after: list[Any] = [
        *user_message("Where is Emma?"),
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Emma is in the tower."},
    ]
    closing = client.chat.completions.create(model=NAME, messages=after, tools=[LOOK], max_tokens=8)
    assert closing.choices[0].message.role == "assistant"


def test_openai_errors_become_the_sdks_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=user_message("a"))
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=NAME, messages=user_message("a"), temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=NAME, prompt="a", max_tokens=10**6)
    assert [model.id for model in client.models.list()] == [NAME]


def test_langchain_chain_whole_and_streamed(chain: ChatOpenAI) -> None:
    question, answer = asked(1)
    messages = [SystemMessage("You know the notebook."), HumanMessage(question)]
    whole = chain.invoke([HumanMessage(question)])
    assert whole.text.strip() == answer
    assert whole.usage_metadata is not None
    chunks = list(chain.stream([HumanMessage(question)]))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    assert len(chain.batch([messages, messages])) == 2


def test_langchain_chain_calls_a_tool_and_continues(chain: ChatOpenAI) -> None:
    ready = chain.bind_tools([look], tool_choice="look")
    first = ready.invoke("Where is Emma?")
    assert isinstance(first, AIMessage)
    (call,) = first.tool_calls
    chunks = list(ready.stream("Where is Emma?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessage)
    assert [tool_call["args"] for tool_call in whole.tool_calls] == [call["args"]]
    result = look.invoke(call)
    assert isinstance(result, ToolMessage)
    final = chain.bind_tools([look]).invoke([HumanMessage("Where is Emma?"), first, result], max_tokens=8)
    assert isinstance(final, AIMessage)


def test_langchain_chain_returns_structured_output(chain: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        asking = chain.with_structured_output(Place, method=method)
        assert isinstance(asking.invoke("Where is Emma?"), Place), method


def test_langchain_legacy_chain(server: Server) -> None:
    model = TextOpenAI(
        base_url=f"{server.url}/v1", api_key=SecretStr("none"), model=NAME, temperature=0, max_tokens=6
    )
    assert model.invoke("Emma is") == "".join(model.stream("Emma is"))


def bench(server: Server, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    status = main(["bench", "--base-url", f"{server.url}/v1", "--ignore-eos", "--json", *words])
    figures = json.loads(capsys.readouterr().out)
    assert (status, figures["failed"], figures["errors"]) == (0, 0, {})
    return figures


def test_shared_prefixes_are_found(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--gsp-num-groups", "2", "--gsp-prompts-per-group", "4", "--gsp-output-len", "8")
    lengths = ("--gsp-system-prompt-len", "320", "--gsp-question-len", "20", "--gsp-ordered")
    words = ("--dataset-name", "gsp", *shape, *lengths, "--max-concurrency", "1", "--seed", "77")
    figures = bench(server, capsys, *words, "--goodput", "ttft:60000", "itl:60000")
    assert figures["total_input_tokens"] == 8 * 340
    assert figures["total_output_tokens"] == 8 * 8
    assert figures["request_goodput"] == figures["request_throughput"]
    places = figures["by_position"]
    assert isinstance(places, dict)
    assert places["rest"]["shared_tokens_computed_max"] < 64
    assert places["first"]["shared_tokens_computed_max"] == 0
    again = bench(server, capsys, *words)
    assert isinstance(again["cached_token_ratio"], float)
    assert again["cached_token_ratio"] > 0.9


def test_chats_of_several_turns_at_a_rate(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--multi-turn-num-conversations", "3", "--multi-turn-num-turns", "2")
    lengths = ("--multi-turn-system-prompt-len", "20", "--multi-turn-question-len", "9")
    words = ("--dataset-name", "multi-turn", *shape, *lengths, "--backend", "openai-chat")
    figures = bench(server, capsys, *words, "--request-rate", "20", "--multi-turn-output-len", "6")
    assert figures["completed"] == 6
    assert figures["total_output_tokens"] == 36


def test_anthropic_message_whole_and_streamed(server: Server) -> None:
    question, answer = asked(0)
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    options: Any = {"model": NAME, "max_tokens": 1000, "messages": talk, "extra_body": {"temperature": 0}}
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.text.strip() for block in message.content if block.type == "text"] == [answer]
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    assert streamed.usage.cache_read_input_tokens
