"""The public gRPC service: the same requests, answers and refusals as over HTTP, whole and streamed."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import EOS, FakeService, app_over, exchange, saying, tokenizer
from tests.support.cluster.grpc_edge import HELLO, Client, serving, trailing
from tests.support.grpc_loop import IN_GRPC_LOOP
from tidemill.cluster.edge.grpc_api.messages import body_of
from tidemill.cluster.edge.requests.bodies import CompletionBody
from tidemill.cluster.rpc.proto import generation_pb2 as pb
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Overloaded, Poisonous, RequestError, Unserved

pytestmark = IN_GRPC_LOOP

WORDS = " Emma is in the tower"


async def answer(service: FakeService, request: pb.GenerateRequest) -> pb.GenerateResponse:
    async with serving(service) as client:
        return await client.generate(request)


async def streamed(service: FakeService, request: pb.GenerateRequest) -> list[pb.GenerateChunk]:
    async with serving(service) as client:
        return [chunk async for chunk in client.stream(request)]


async def over_http(service: FakeService, **body: object) -> Any:  # noqa: ANN401 - JSON
    sent = {"prompt": "Hello", **body}
    return (await exchange(app_over(service), "POST", "/v1/completions", json=sent)).json()


async def test_answer_is_that_of_http() -> None:
    whole = await answer(FakeService(saying(WORDS)), pb.GenerateRequest(text="Hello", logprobs=2))
    http = await over_http(FakeService(saying(WORDS)), logprobs=2)
    (choice,), (of_http,), usage = whole.choices, http["choices"], http["usage"]
    assert choice.text == of_http["text"] == WORDS
    assert list(choice.token_ids) == [*tokenizer().encode(WORDS), EOS]
    assert choice.finish_reason == pb.FINISH_REASON_STOP
    assert whole.model == "keeper"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert whole.usage.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
    assert b"".join(logprob.token for logprob in choice.logprobs).decode() == WORDS
    assert [logprob.logprob for logprob in choice.logprobs] == of_http["logprobs"]["token_logprobs"]
    for logprob in choice.logprobs:
        assert [(top.token_id, top.logprob) for top in logprob.top] == [(10, 0.0), (11, -0.125)]


@pytest.mark.parametrize(
    "sampling", [pb.Sampling(), pb.Sampling(n=3, seed=1), pb.Sampling(stop=[" in"])], ids=["one", "n", "stop"]
)
@pytest.mark.parametrize("per_piece", [1, 4])
async def test_stream_adds_up_to_the_whole(sampling: pb.Sampling, per_piece: int) -> None:
    request = pb.GenerateRequest(text="Hello", sampling=sampling, logprobs=2)
    whole = await answer(FakeService(saying(WORDS), per_piece=per_piece), request)
    chunks = await streamed(FakeService(saying(WORDS), per_piece=per_piece), request)
    for index, choice in enumerate(whole.choices):
        parts = [chunk.choice for chunk in chunks if chunk.choice.index == index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("token_ids", "logprobs"):
            assert [item for part in parts for item in getattr(part, name)] == list(getattr(choice, name))
        unfinished = [pb.FINISH_REASON_UNSPECIFIED] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [*unfinished, choice.finish_reason]
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stop_string_ends_the_answer_and_its_tokens() -> None:
    request = pb.GenerateRequest(text="Hello", sampling=pb.Sampling(stop=[" tower"]))
    (choice,) = (await answer(FakeService(saying(WORDS + " of London"), per_piece=3), request)).choices
    assert choice.text == " Emma is in the"
    assert list(choice.token_ids) == tokenizer().encode(WORDS)


FIELDS: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.125,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "logit_bias": {3: -100.0, 5: 2.5},
    "seed": -9,
    "n": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "bad_words": ["tower", "harbor"],
}
REST: dict[str, Any] = {
    "logprobs": 3,
    "cache_salt": "s",
    "priority": -5,
    "cache_breakpoints": [2, 1],
    "retain": 60.0,
    "session_id": "agent-7",
    "truncate_prompt_tokens": 2,
    "truncation_side": "right",
    "model": "keeper",
}
FORMS: list[dict[str, Any]] = [
    {"json": '{"type": "object"}'},
    {"regex": "[ab]+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a"'},
    {"json_object": True},
]


def message_of(sampling: dict[str, Any], rest: dict[str, Any], form: dict[str, Any]) -> pb.GenerateRequest:
    if "choice" in form:
        form = {"choice": pb.Choices(texts=form["choice"])}
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.Sampling(**sampling),
        structured_outputs=pb.StructuredOutputs(**form) if form else None,
        **rest,
    )


@given(
    st.sets(st.sampled_from(sorted(FIELDS))),
    st.sets(st.sampled_from(sorted(REST))),
    st.sampled_from([{}, *FORMS]),
)
@settings(max_examples=60, deadline=None)
def test_every_field_has_the_meaning_of_http(
    names: set[str], rest_names: set[str], form: dict[str, Any]
) -> None:
    sampling = {name: FIELDS[name] for name in names}
    rest = {name: REST[name] for name in rest_names}
    over_http: dict[str, Any] = {"prompt": [5, 6, 7], **sampling, **rest}
    if form:
        over_http["structured_outputs"] = form
    expected = CompletionBody.model_validate_json(json.dumps(over_http))
    assert body_of(message_of(sampling, rest, form).SerializeToString()) == expected


async def test_service_gets_the_same_request_as_from_http() -> None:
    service = FakeService(saying(WORDS))
    await answer(service, message_of(FIELDS, REST, {}))
    await over_http(service, prompt=[5, 6, 7], **FIELDS, **REST)
    sent = [replace(request, request_id="") for request in service.requests]
    assert sent[:2] == sent[2:]
    assert (sent[0].breakpoints, sent[0].retain_s) == ((1, 2), 60)
    assert sent[0].session
    assert sent[0].tokens == (5, 6), "the prompt is cut at its end"
    assert sent[0].sampling.bad_words


def test_every_sampling_field_is_tested() -> None:
    assert {*REST, "text", "token_ids", "sampling", "structured_outputs"} == {
        field.name for field in pb.GenerateRequest.DESCRIPTOR.fields
    }
    assert set(FIELDS) == {field.name for field in pb.Sampling.DESCRIPTOR.fields}
    assert {name for form in FORMS for name in form} == {
        field.name for field in pb.StructuredOutputs.DESCRIPTOR.fields
    }


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
REFUSED: list[tuple[dict[str, Any], grpc.StatusCode, str | None]] = [
    ({"text": "a", "model": "other"}, NOT_FOUND, "model"),
    ({}, INVALID, "prompt"),
    ({"token_ids": pb.TokenIds(ids=[])}, INVALID, "prompt"),
    ({"token_ids": pb.TokenIds(ids=[896])}, INVALID, "prompt"),
    ({"text": "a", "sampling": pb.Sampling(top_p=float("nan"))}, INVALID, "top_p"),
    ({"text": "a", "sampling": pb.Sampling(logit_bias={5: 101})}, INVALID, "logit_bias"),
    ({"text": "a", "structured_outputs": pb.StructuredOutputs(json="{")}, INVALID, "structured_outputs.json"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
async def test_requests_that_http_refuses_are_refused(
    fields: dict[str, Any], code: grpc.StatusCode, param: str | None
) -> None:
    service = FakeService(saying("a"))
    async with serving(service) as client:
        error = await client.refusal(pb.GenerateRequest(**fields), code)
        assert trailing(error).get("tidemill-param") == param
        assert error.details()
        assert "retry-after" not in trailing(error)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stream(pb.GenerateRequest(**fields)).read()
        assert (caught.value.code(), caught.value.details()) == (code, error.details())
    assert not service.requests


@given(st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    with suppress(RequestError):
        assert isinstance(body_of(data), CompletionBody)


FAILURES: list[tuple[TidemillError, grpc.StatusCode, str | None]] = [
    (Unserved("no worker"), grpc.StatusCode.UNAVAILABLE, "1"),
    (Overloaded("busy", predicted_s=9.0, retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "3"),
    (Poisonous("it ends workers"), grpc.StatusCode.INTERNAL, None),
    (RequestError("too long", param="prompt"), grpc.StatusCode.INVALID_ARGUMENT, None),
]


@pytest.mark.parametrize(("failure", "code", "retry"), FAILURES)
@pytest.mark.parametrize("at", [0, 2])
async def test_losses_are_statuses(
    failure: TidemillError, code: grpc.StatusCode, retry: str | None, at: int
) -> None:
    async with serving(FakeService(saying(WORDS), fail_at=at, failure=failure)) as client:
        assert trailing(await client.refusal(HELLO, code)).get("retry-after") == retry
        stream = client.stream(HELLO)
        for _ in range(at):
            assert isinstance(await stream.read(), pb.GenerateChunk)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is code


async def test_bug_reveals_no_internals(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService(saying("a"), fail_at=0, failure=ZeroDivisionError("secret of the house"))
    async with serving(service) as client:
        error = await client.refusal(HELLO, grpc.StatusCode.INTERNAL)
        assert "secret" not in (error.details() or "")
    assert "secret of the house" in caplog.text


async def test_tokenize_and_models() -> None:
    async with serving() as client:
        data = await client.call("Tokenize")(pb.TokenizeRequest(text=WORDS).SerializeToString())
        tokenized = pb.TokenizeResponse.FromString(data)
        assert list(tokenized.token_ids) == tokenizer().encode(WORDS)
        assert tokenized.max_model_len == 512
        data = await client.call("ListModels")(b"")
        (model,) = pb.ListModelsResponse.FromString(data).models
        assert (model.name, model.root, model.vocab_size) == ("keeper", "keeper", 896)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("Tokenize")(pb.TokenizeRequest(text="a", model="b").SerializeToString())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_calls_carry_an_id() -> None:
    async def id_of(client: Client, *metadata: tuple[str, str]) -> str:
        stream = client.stream(HELLO, *metadata)
        return dict(await stream.initial_metadata())["x-request-id"]

    async with serving() as client:
        assert await id_of(client, ("x-request-id", "mine-7")) == "mine-7"
        assert await id_of(client)
        assert await id_of(client, ("x-request-id", "a" * 200)) != "a" * 200


async def test_calls_are_measured() -> None:
    async with serving() as client:
        await client.generate(HELLO)
        await client.refusal(b"\xff", INVALID)
        families = client.context.metrics.registry.collect()
    values = [(sample.name, sample.value) for family in families for sample in family.samples]
    for name in ("request_success_total", "request_errors_total"):
        assert sum(value for known, value in values if name in known) == 1
