"""The `openai` SDK, unmodified, over a real socket."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.cluster.fake_service import FakeService, saying, scored, tokenizer
from tests.support.cluster.openai_talk import conversing

ANSWER = " Emma is in the tower."


async def test_chat() -> None:
    async with conversing(FakeService(saying(ANSWER))) as client:
        reply = await client.chat.completions.create(
            model="keeper", messages=[{"role": "user", "content": "Where is Emma?"}], max_completion_tokens=50
        )
        assert reply.choices[0].message.content == ANSWER
        assert reply.choices[0].finish_reason == "stop"
        usage = reply.usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 4 - 1
        models = await client.models.list()
        assert [model.id for model in models.data] == ["keeper"]


async def test_streamed_chat() -> None:
    async with conversing(FakeService(saying(ANSWER))) as client:
        text, finishes = "", list[str]()
        total: Any = None
        async with await client.chat.completions.create(
            model="keeper",
            messages=[{"role": "user", "content": "Where is Emma?"}],
            stream=True,
            stream_options={"include_usage": True},
        ) as chunks:
            async for chunk in chunks:
                total = chunk.usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finishes += [choice.finish_reason] if choice.finish_reason else []
        assert (text, finishes) == (ANSWER, ["stop"])
        assert total.total_tokens == total.prompt_tokens + total.completion_tokens


async def test_completions_streamed_and_not() -> None:
    async with conversing(FakeService(saying(ANSWER))) as client:
        whole = await client.completions.create(model="keeper", prompt=["a", "b"], stop="tower", seed=3)
        assert [choice.text for choice in whole.choices] == [" Emma is in the "] * 2
        text = ""
        async for chunk in await client.completions.create(model="keeper", prompt=[5, 6], stream=True):
            text += chunk.choices[0].text
        assert text == ANSWER


async def test_logprobs_of_chats_and_completions() -> None:
    tokens = tokenizer().encode(ANSWER)
    async with conversing(FakeService(saying(ANSWER))) as client:
        reply = await client.chat.completions.create(
            model="keeper", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2
        )
        logprobs = reply.choices[0].logprobs
        assert "".join(entry.token for entry in logprobs.content) == ANSWER
        assert [entry.logprob for entry in logprobs.content] == [scored(token, 2).logprob for token in tokens]
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
        async with client.chat.completions.stream(
            model="keeper", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].logprobs == logprobs
        whole = await client.completions.create(model="keeper", prompt="a", logprobs=1)
        assert whole.choices[0].logprobs.tokens == [entry.token for entry in logprobs.content]


async def test_breakpoints_of_texts_and_chats_reach_the_service() -> None:
    service = FakeService(saying(ANSWER))
    text = "Where is Emma? She is in the tower."
    first = "Where is Emma?"
    async with conversing(service) as client:
        await client.completions.create(
            model="keeper", prompt=text, extra_body={"cache_breakpoints": [len(text), len(first)]}
        )
        await client.chat.completions.create(model="keeper", messages=[{"role": "user", "content": first}])
    completion, chat = service.requests
    assert completion.breakpoints == (len(tokenizer().encode(first)), len(completion.tokens))
    assert chat.breakpoints == (1, len(chat.tokens)), "behind the head of the message, and all of it"


async def test_parsed_answer() -> None:
    class Place(BaseModel):
        name: str

    service = FakeService(saying('{"name": "tower"}'))
    async with conversing(service) as client:
        reply = await client.chat.completions.parse(
            model="keeper", messages=[{"role": "user", "content": "a"}], response_format=Place
        )
        assert reply.choices[0].message.parsed == Place(name="tower")
    grammar = service.requests[0].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["properties"]["name"]["type"] == "string"


async def test_errors_become_the_sdks_own() -> None:
    async with conversing(FakeService(saying(ANSWER))) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-4", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="keeper", prompt="a", max_tokens=10_000)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="forces a call"):
            await client.chat.completions.create(
                model="keeper",
                messages=[{"role": "user", "content": "a"}],
                tools=[{"type": "function", "function": {"name": "f"}}],
                tool_choice="required",
                response_format={"type": "json_object"},
            )


async def test_failure_in_mid_stream_is_raised() -> None:
    async with conversing(FakeService(saying(ANSWER), fail_at=2)) as client:
        stream = await client.completions.create(model="keeper", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="no worker is left"):
            async for _ in stream:
                pass
