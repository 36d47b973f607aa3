"""The `openai` SDK, unmodified, over a real socket."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.cluster.fake_service import FakeService, saying, scored, tokenizer
from tests.support.cluster.openai_talk import conversing

ANSWER = " Emma is in the tower."


async def test_answers_streamed_and_not() -> None:
    asked: Any = {"model": "keeper", "messages": [{"role": "user", "content": "Where is Emma?"}]}
    async with conversing(FakeService(saying(ANSWER))) as client:
        reply = await client.chat.completions.create(**asked, max_completion_tokens=50)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (ANSWER, "stop")
        usage = reply.usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 4 - 1
        streamed: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, **streamed)]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage == usage
        whole = await client.completions.create(model="keeper", prompt=["a", "b"], stop="tower", seed=3)
        assert [choice.text for choice in whole.choices] == [" Emma is in the "] * 2
        pieces = await client.completions.create(model="keeper", prompt=[5, 6], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in pieces]) == ANSWER
        assert [model.id for model in (await client.models.list()).data] == ["keeper"]


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
        with pytest.raises(openai.BadRequestError, match="needs tools"):
            await client.chat.completions.create(
                model="keeper",
                messages=[{"role": "user", "content": "a"}],
                tool_choice="required",
            )


async def test_failure_in_mid_stream_is_raised() -> None:
    async with conversing(FakeService(saying(ANSWER), fail_at=2)) as client:
        stream = await client.completions.create(model="keeper", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="no worker is left"):
            async for _ in stream:
                pass
