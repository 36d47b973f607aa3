"""The public gRPC service: the same requests, answers and refusals as over HTTP, whole and streamed."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import grpc_loop
from tests.support.cluster.fake_service import EOS, FakeService, app_over, call, complete, saying, tokenizer
from tests.support.cluster.grpc_edge import HELLO, Client, serving, trailing
from tidemill.cluster.edge.grpc_api.messages import body_of
from tidemill.cluster.edge.requests.bodies import CompletionBody
from tidemill.cluster.rpc.proto import generation_pb2 as pb
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Overloaded, Poisonous, Request, RequestError, Unserved

WORDS = " Emma is in the tower"


def answer(service: FakeService, request: pb.GenerateRequest) -> pb.GenerateResponse:
    async def main() -> pb.GenerateResponse:
        async with serving(service) as client:
            return await client.generate(request)

    return grpc_loop.run(main())


def streamed(service: FakeService, request: pb.GenerateRequest) -> list[pb.GenerateChunk]:
    async def main() -> list[pb.GenerateChunk]:
        async with serving(service) as client:
            return [chunk async for chunk in client.stream(request)]

    return grpc_loop.run(main())


def test_answer_is_that_of_http() -> None:
    whole = answer(FakeService(saying(WORDS)), HELLO)
    over_http = complete(app_over(FakeService(saying(WORDS))))
    (choice,) = whole.choices
    assert choice.text == over_http["choices"][0]["text"] == WORDS
    assert list(choice.token_ids) == [*tokenizer().encode(WORDS), EOS]
    assert choice.finish_reason == pb.FINISH_REASON_STOP
    assert whole.model == "keeper"
    usage = over_http["usage"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.cached_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("per_piece", [1, 4])
def test_stream_adds_up_to_the_whole(n: int, per_piece: int) -> None:
    request = pb.GenerateRequest(text="Hello", sampling=pb.Sampling(n=n, seed=1), logprobs=2)
    whole = answer(FakeService(saying(WORDS), per_piece=per_piece), request)
    chunks = streamed(FakeService(saying(WORDS), per_piece=per_piece), request)
    for index in range(n):
        parts = [chunk.choice for chunk in chunks if chunk.choice.index == index]
        assert "".join(part.text for part in parts) == whole.choices[index].text
        for name in ("token_ids", "logprobs"):
            grown = [grown_part for part in parts for grown_part in getattr(part, name)]
            assert grown == list(getattr(whole.choices[index], name))
        assert [part.finish_reason for part in parts[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (
            len(parts) - 1
        )
        assert parts[-1].finish_reason == whole.choices[index].finish_reason
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs_come_with_the_bytes_of_their_tokens() -> None:
    whole = answer(FakeService(saying(WORDS)), pb.GenerateRequest(text="Hello", logprobs=2))
    over_http = complete(app_over(FakeService(saying(WORDS))), logprobs=2)["choices"][0]["logprobs"]
    (choice,) = whole.choices
    assert b"".join(logprob.token for logprob in choice.logprobs).decode() == WORDS
    assert [logprob.logprob for logprob in choice.logprobs] == over_http["token_logprobs"]
    assert all(
        [(top.token_id, top.logprob) for top in logprob.top] == [(10, 0.0), (11, -0.125)]
        for logprob in choice.logprobs
    )


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_answer_and_its_tokens(*, stream: bool) -> None:
    request = pb.GenerateRequest(text="Hello", sampling=pb.Sampling(stop=[" tower"]))
    service = FakeService(saying(WORDS + " of London"), per_piece=3)
    if stream:
        chunks = streamed(service, request)
        text = "".join(chunk.choice.text for chunk in chunks)
        ids = [token for chunk in chunks for token in chunk.choice.token_ids]
    else:
        (choice,) = answer(service, request).choices
        text, ids = choice.text, list(choice.token_ids)
    assert text == " Emma is in the"
    assert ids == tokenizer().encode(WORDS)


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


def test_service_gets_the_same_request_as_from_http() -> None:
    service = FakeService(saying(WORDS))
    answer(service, message_of(FIELDS, REST, {}))
    complete(app_over(service), prompt=[5, 6, 7], **FIELDS, **REST)
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


REFUSED: list[tuple[dict[str, Any], grpc.StatusCode, str | None]] = [
    ({"text": "a", "model": "other"}, grpc.StatusCode.NOT_FOUND, "model"),
    ({}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ({"token_ids": pb.TokenIds(ids=[])}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ({"token_ids": pb.TokenIds(ids=[896])}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ({"token_ids": pb.TokenIds(ids=[5] * 512)}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    ({"text": "a", "sampling": pb.Sampling(temperature=3)}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ({"text": "a", "sampling": pb.Sampling(top_p=float("nan"))}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
    ({"text": "a", "sampling": pb.Sampling(n=17)}, grpc.StatusCode.INVALID_ARGUMENT, "n"),
    ({"text": "a", "sampling": pb.Sampling(max_tokens=0)}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    ({"text": "a", "sampling": pb.Sampling(stop=["a"] * 5)}, grpc.StatusCode.INVALID_ARGUMENT, "stop"),
    (
        {"text": "a", "sampling": pb.Sampling(logit_bias={5: 101})},
        grpc.StatusCode.INVALID_ARGUMENT,
        "logit_bias",
    ),
    ({"text": "a", "logprobs": 21}, grpc.StatusCode.INVALID_ARGUMENT, "logprobs"),
    ({"text": "a", "cache_salt": "a b"}, grpc.StatusCode.INVALID_ARGUMENT, "cache_salt"),
    ({"text": "a", "priority": 101}, grpc.StatusCode.INVALID_ARGUMENT, "priority"),
    (
        {"text": "a", "structured_outputs": pb.StructuredOutputs(json="{")},
        grpc.StatusCode.INVALID_ARGUMENT,
        "structured_outputs.json",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
def test_requests_that_http_refuses_are_refused(
    fields: dict[str, Any], code: grpc.StatusCode, param: str | None
) -> None:
    service = FakeService(saying("a"))

    async def main() -> None:
        async with serving(service) as client:
            error = await client.refusal(pb.GenerateRequest(**fields).SerializeToString())
            assert error.code() is code
            assert trailing(error).get("tidemill-param") == param
            assert error.details()
            assert "retry-after" not in trailing(error)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.stream(pb.GenerateRequest(**fields)).read()
            assert (caught.value.code(), caught.value.details()) == (code, error.details())

    grpc_loop.run(main())
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
def test_losses_are_statuses(
    failure: TidemillError, code: grpc.StatusCode, retry: str | None, at: int
) -> None:
    service = FakeService(saying(WORDS), fail_at=at, failure=failure)

    async def main() -> None:
        async with serving(service) as client:
            error = await client.refusal(HELLO.SerializeToString())
            assert (error.code(), trailing(error).get("retry-after")) == (code, retry)
            stream = client.stream(HELLO)
            for _ in range(at):
                assert isinstance(await stream.read(), pb.GenerateChunk)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is code

    grpc_loop.run(main())


def test_bug_reveals_no_internals(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Request) -> Sequence[int]:
        raise ZeroDivisionError("secret of the house")

    async def main() -> None:
        async with serving(FakeService(broken)) as client:
            error = await client.refusal(HELLO.SerializeToString())
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in (error.details() or "")

    grpc_loop.run(main())
    assert "secret of the house" in caplog.text


def test_tokenize_and_models() -> None:
    async def main() -> None:
        async with serving(FakeService(saying("a"))) as client:
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

    grpc_loop.run(main())


def test_calls_carry_an_id() -> None:
    async def id_of(client: Client, *metadata: tuple[str, str]) -> str:
        stream = client.stream(HELLO, *metadata)
        return dict(await stream.initial_metadata())["x-request-id"]

    async def main() -> None:
        async with serving(FakeService(saying("a"))) as client:
            assert await id_of(client, ("x-request-id", "mine-7")) == "mine-7"
            assert await id_of(client)
            assert await id_of(client, ("x-request-id", "a" * 200)) != "a" * 200

    grpc_loop.run(main())


def test_edge_measures_both() -> None:
    async def main() -> None:
        async with serving(FakeService(saying(WORDS))) as client:
            await client.generate(HELLO)
            await client.refusal(b"\xff")
            metrics = client.context.metrics
            text = {
                sample.name + str(sorted(sample.labels.items())): sample.value
                for family in metrics.registry.collect()
                for sample in family.samples
            }
            assert sum(value for name, value in text.items() if "request_success_total" in name) == 1
            assert sum(value for name, value in text.items() if "request_errors_total" in name) == 1

    grpc_loop.run(main())
    assert call(app_over(FakeService(saying(WORDS))), "GET", "/metrics").status_code == 200
