"""Our requests become bodies of vLLM, and its frames, as recorded, become our deltas."""

import json
from dataclasses import replace
from typing import Any

import llguidance
import pytest

from tests.support.workers.vllm_server import REFUSAL, frame_of
from tidemill.workers.messages import BLANKS, Delta, Grammar, Request, RequestError, Sampling, WorkerGone
from tidemill.workers.vllm.generate import body_of, delta_of, priority_of, structured_outputs
from tidemill.workers.vllm.generate import frame_of as read_frame

REQUEST = Request(request_id="r", tokens=(5, 6, 7), max_new_tokens=9, stop_token_ids=(0,))
GREEDY = Sampling(temperature=0.0)
OPTIONS = {"whitespace_pattern": BLANKS, "coerce_one_of": True}


def sampling_of(request: Request) -> dict[str, Any]:
    return body_of(request, 0)["sampling_params"]


def test_body_of_a_greedy_request() -> None:
    request = replace(REQUEST, sampling=GREEDY, salt="tenant")
    assert body_of(request, -3) == {
        "request_id": "r",
        "token_ids": (5, 6, 7),
        "cache_salt": "tenant",
        "priority": -3,
        "stream": True,
        "sampling_params": {
            "max_tokens": 9,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "stop_token_ids": (0,),
            "ignore_eos": True,
            "detokenize": False,
        },
    }
    assert "cache_salt" not in body_of(REQUEST, 0)


def test_seed_is_sent_only_if_the_client_chose_it() -> None:
    assert "seed" not in sampling_of(replace(REQUEST, sampling=Sampling(seed=3)))
    assert sampling_of(replace(REQUEST, sampling=Sampling(seed=3, seeded=True)))["seed"] == 3


def test_minimum_counts_what_was_drawn_before_a_loss() -> None:
    for drawn, left in ((0, 6), (2, 4), (7, 0)):
        request = replace(REQUEST, drawn=drawn, sampling=Sampling(min_tokens=6))
        assert sampling_of(request)["min_tokens"] == left


def test_values_that_vllm_refuses_have_their_nearest_meaning() -> None:
    sent = sampling_of(replace(REQUEST, sampling=Sampling(top_p=0.0, logit_bias=((4, float("-inf")),))))
    assert 0 < sent["top_p"] < 1e-6
    assert json.loads(json.dumps(sent["logit_bias"], allow_nan=False)) == {"4": -1e30}


def test_precedence_is_arrival_later_by_ten_seconds_a_class() -> None:
    assert priority_of(REQUEST, 2.5) == 2500
    assert priority_of(replace(REQUEST, priority=1, queue_offset_s=-0.5), 2.5) == 12000


def test_tokens_and_finish_of_frames() -> None:
    assert delta_of(read_frame(frame_of(5, 6)), None) == Delta(tokens=(5, 6))
    for finish in ("stop", "length"):
        assert delta_of(read_frame(frame_of(0, finish=finish)), None) == Delta(tokens=(0,), finish=finish)
    assert delta_of(read_frame(b'{"request_id":"r","usage":{"prompt_tokens":75},"choices":[]}'), None) is None
    with pytest.raises(WorkerGone, match="ended a stream: abort"):
        delta_of(read_frame(frame_of(finish="abort")), None)


@pytest.mark.parametrize(
    ("rank", "logprobs", "top"),
    [
        (1, 2, ((493, -5.0), (6623, -5.5))),
        (1, 1, ((493, -5.0),)),
        (9, 2, ((6623, -5.5), (5479, -5.7))),  # the drawn token is none of the likeliest
        (1, 0, ()),
    ],
)
def test_likeliest_tokens_by_rank(rank: int, logprobs: int, top: tuple[tuple[int, float], ...]) -> None:
    likely = [{"token_id": 493, "logprob": -5.0, "rank": rank}]
    likely += [{"token_id": 6623, "logprob": -5.5, "rank": 3 - min(rank, 2)}]
    likely += [{"token_id": 5479, "logprob": -5.7, "rank": 4 - min(rank, 2)}]
    entry = {"token_id": 493, "logprob": -5.0, "rank": rank, "top_logprobs": likely}
    delta = delta_of(read_frame(frame_of(493, logprobs=[entry])), logprobs)
    assert delta is not None
    assert [(each.logprob, each.top) for each in delta.logprobs] == [(-5.0, top)]


def test_refusals_are_the_clients_and_failures_the_workers() -> None:
    with pytest.raises(RequestError, match=r"temperature must be in \[0, 2\]") as refused:
        delta_of(read_frame(json.dumps(REFUSAL).encode()), None)
    assert refused.value.param == "temperature"
    failed = {
        "error": {"message": "EngineCore encountered an issue.", "type": "I", "param": None, "code": 500}
    }
    with pytest.raises(WorkerGone, match="EngineCore encountered"):
        delta_of(read_frame(json.dumps(failed).encode()), None)
    with pytest.raises(WorkerGone, match="no frame"):
        read_frame(b"<html>")


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("grammar", "fields"),
    [
        (Grammar(kind="json_object"), {"json": {"type": "object", "x-guidance": OPTIONS}}),
        (Grammar(kind="json_schema", text=SCHEMA), {"json": {**json.loads(SCHEMA), "x-guidance": OPTIONS}}),
        (Grammar(kind="regex", text="a/b+"), {"regex": "a/b+"}),
        (Grammar(kind="choice", text='["x", "y"]'), {"choice": ["x", "y"]}),
        (Grammar(kind="lark", text='start: "x"'), {"grammar": 'start: "x"'}),
    ],
)
def test_grammars(grammar: Grammar, fields: dict[str, Any]) -> None:
    assert structured_outputs(grammar) == fields


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_object"),
        Grammar(kind="json_schema", text=SCHEMA),
        Grammar(kind="regex", text="a/b+"),
        Grammar(kind="choice", text='["x", "y"]'),
    ],
)
def test_a_grammar_in_a_frame_is_a_rule_that_the_library_of_vllm_compiles(grammar: Grammar) -> None:
    framed = replace(grammar, frame='start: "</think>" @answer')
    text = structured_outputs(framed)["grammar"]
    assert llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("grammar", text)) == ""


def test_lark_in_a_frame_is_refused() -> None:
    with pytest.raises(RequestError, match="no lark grammar behind a thought"):
        structured_outputs(Grammar(kind="lark", text="start: X", frame="start: @answer"))
