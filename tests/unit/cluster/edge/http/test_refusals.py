"""A wrong field is named, whatever the endpoint, and its request never reaches the service."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.support.cluster.fake_service import MODEL, FakeService, app_over, post, saying
from tests.support.cluster.openai_talk import LOOK
from tidemill.cluster.edge.apis.pooling_body import INPUTS_MAX
from tidemill.cluster.edge.chat.request.structured import PATTERN_BYTES_MAX
from tidemill.cluster.edge.requests.bodies import MESSAGES_MAX
from tidemill.workers.messages import Pooling

CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, PREFIXES, MEMORY = "/v1/responses", "/v1/prefixes", "/cluster/memory"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
USER = {"role": "user", "content": "Hello!"}
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "Hello"},
    TOKENS: {"token_ids": [5], "sampling_params": {}},
    RESPONSES: {"input": "Hello!"},
    PREFIXES: {},
    TOKENIZE: {},
    DETOKENIZE: {},
    EMBEDDINGS: {"input": "a"},
    RERANK: {"query": "q", "documents": ["a"]},
    SCORE: {"text_1": "q", "text_2": "a"},
    MEMORY: {"worker": "decode-0", "budget": 1},
}
"""A body of each endpoint, as far as it needs one."""

IN_OTHER_WORDS = re.compile("do not stream|logprobs of prompts")
GENERATES = FakeService(saying("a"))
POOLS = FakeService(saying("a"), model=replace(MODEL, pooling=Pooling(kind="embed", size=4)))
NAN = float("nan")
WRONG: dict[str, dict[str, list[Any]]] = {
    TEXT: {
        "temperature": ["warm", 2.1, NAN, True],
        "top_p": [0, float("inf")],
        "top_k": [-2],
        "min_p": [1.5],
        "max_tokens": [0, 10**300, 2.5],
        "seed": [1 << 63],
        "n": [17, 0],
        "stop": [["1"] * 65, 7],
        "stop_token_ids": [[896], [5] * 65],
        "logprobs": [21, -1, True],
        "presence_penalty": [2.1],
        "frequency_penalty": [-2.1],
        "repetition_penalty": [0, 1e9],
        "logit_bias": [
            *({token: 1} for token in ("896", "-1", "5.0", "\u0665")),
            *({"5": bias} for bias in (100.5, True)),
            {str(token): 1 for token in range(1025)},
            [5],
        ],
        "bad_words": ["a", ["a"] * 129, ["  "]],
        "truncate_prompt_tokens": [-2, 512],
        "truncation_side": ["middle"],
        "min_tokens": [512, -1],
        "priority": [101, -101, 0.5],
        "include_stop_str_in_output": [1],
        "response_format": ["json_object"],
        "guided_json": [[1]],
        "stream": ["yes"],
        "cache_salt": ["a b", "a\n", "s" * 129],
        "model": ["k" * 257],
        "cache_breakpoints": [[2, 6]],
        "prompt": [..., None, "", "\ud800", {"text": "a"}, ["a"] * 65],
        "best_of": [17],
        "echo": [1],
        "prompt_logprobs": [21, -1],
    },
    CHAT: {
        "messages": [[], "Hello!", [USER] * (MESSAGES_MAX + 1)],
        "top_logprobs": [2],
        "logprobs": [5],
        "session_id": ["", "\ud800", "a" * 257],
        "prompt_cache_retention": ["48h"],
        "nvext": [1],
        "tools": [[LOOK] * 129],
        "tool_choice": ["required"],
        "chat_template_kwargs": [{"tokenize": True}, {"chat_template": "{{ 1 }}"}],
    },
    TOKENS: {
        "token_ids": [[], [1 << 20], [-1]],
        "sampling_params": [None],
        "kv_transfer_params": [{"do_remote_decode": True}],
        "features": [{"mm_hashes": {}}],
        "request_id": ["a\nb", "a" * 129],
        "cache_salt": ["a b"],
    },
    RESPONSES: {
        "previous_response_id": ["resp_1"],
        "conversation": ["conv_1"],
        "background": [True],
        "input": [[], 5, [{"type": "item_reference", "id": "msg_1"}], "a " * 1000],
        "tool_choice": [{"type": "file_search"}, "required"],
        "max_output_tokens": [0],
        "temperature": [3],
        "top_k": ["a"],
        "top_logprobs": [3],
        "include": [["message.output_text.logprobs"], True, 7, "message.output_text.logprobs", {"a": 1}],
        "chat_template": ["{{ 1 }}"],
    },
    PREFIXES: {"prompt": ["", [["a"]], "a " * 600]},
    TOKENIZE: {"messages": [[USER] * (MESSAGES_MAX + 1)]},
    DETOKENIZE: {"tokens": [[-1], [MODEL.vocab_size], "a"]},
    EMBEDDINGS: {
        "input": [..., [], {"a": 1}, ["a"] * (INPUTS_MAX + 1), [1 << 40], "word " * 600],
        "encoding_format": ["hex"],
        "embed_dtype": ["float16"],
        "add_special_tokens": [False],
        "dimensions": [0],
    },
    RERANK: {"documents": [[]], "query": [1]},
    SCORE: {"text_2": [...]},
    MEMORY: {"budget": [..., "much", "9" * 40, 0, -1, 1.5, True, [1]], "worker": [..., 1], "wroker": ["x"]},
}
"""Values of a field that are refused by its name; `...`: it is missing."""


def marked(mark: dict[str, str]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": mark}]}


def asked(**message: Any) -> dict[str, Any]:  # noqa: ANN401 - as JSON has it
    return {"messages": [{"role": "user", **message}]}


def calls(name: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name}}]


def strictly(**wanted: object) -> dict[str, Any]:
    parameters = {"type": ["object", "null"], "properties": {"at": wanted}}
    return {"type": "function", "function": {"name": "look", "parameters": parameters, "strict": True}}


LARGE = {"type": "function", "function": {"name": "f", "parameters": {"title": "a" * 70_000}}}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1},
    "stop[0]": {"stop": [1]},
    "allowed_token_ids": {"allowed_token_ids": [1]},
    "prompt": {"prompt": "a"},
}
UNKNOWN_TOKENS: list[Any] = [[], [[5], []], [5, 896], [-1], [5, True], [5, "a"]]
INSIDE: list[tuple[str, dict[str, Any], str | None]] = [
    *((TEXT, {"prompt": tokens}, "prompt") for tokens in UNKNOWN_TOKENS),
    (TEXT, {"truncate_prompt_tokens": 0}, "prompt"),
    (TEXT, {"prompt": ["a"] * 9, "n": 16}, "n"),
    (TEXT, {"stop": "é" * 129}, "stop[0]"),
    (TEXT, {"stop": ["\ud800"]}, "stop[0]"),
    (TEXT, {"bad_words": [""]}, "bad_words[0]"),
    (TEXT, {"bad_words": ["a" * 257]}, "bad_words[0]"),
    (TEXT, {"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    (TEXT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (TEXT, {"structured_outputs": {"regex": "a" * (PATTERN_BYTES_MAX + 1)}}, "structured_outputs.regex"),
    (TEXT, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    (TEXT, {"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
    (TEXT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (TEXT, {"prompt": [[5, 6], [5]], "cache_breakpoints": [2]}, "cache_breakpoints"),
    (TEXT, {"cache_breakpoints": [0]}, "cache_breakpoints[0]"),
    (TEXT, {"cache_breakpoints": [1, 2, 3, 4, 5]}, "cache_breakpoints"),
    (TEXT, {"best_of": 2, "n": 3}, "best_of"),
    (TEXT, {"best_of": 2, "stream": True}, "best_of"),
    (TEXT, {"prompt": ["a"] * 64, "best_of": 3}, "n"),
    (TEXT, {"max_tokens": -1, "echo": True}, "max_tokens"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (TEXT, {"prompt": [[5] * 500] * 40, "prompt_logprobs": 20}, "prompt_logprobs"),
    (TEXT, {"prompt": [[5] * 500] * 40, "echo": True, "logprobs": 20}, "logprobs"),
    (CHAT, {"messages": [{"role": "narrator", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    (CHAT, asked(content=None), "messages[0].content"),
    (CHAT, asked(content="\ud800"), "messages[0].content"),
    (CHAT, asked(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content"),
    (CHAT, asked(content=[{"type": "text", "text": "\ud800"}]), "messages[0].content[0].text"),
    (CHAT, asked(content="a", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    (CHAT, asked(tool_calls=[{"function": {"name": "f"}}]), "messages[0].content"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": 9, "min_tokens": 5}, "min_tokens"),
    (CHAT, {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    (CHAT, {"cache_control": {"type": "forever"}}, "cache_control.type"),
    (CHAT, {"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
    (CHAT, {"extra_key": "a", "cache_salt": "b"}, "extra_key"),
    (CHAT, {"messages": [marked({})]}, "messages[0]"),
    (CHAT, {"messages": [marked({"type": "ephemeral"})] * 5}, "cache_control"),
    (CHAT, {"tools": calls("no spaces")}, "tools[0].function.name"),
    (CHAT, {"tools": [LOOK], "tool_choice": "any"}, "tool_choice"),
    (CHAT, {"tools": [LOOK], "tool_choice": calls("f")[0]}, "tool_choice"),
    (
        CHAT,
        {"tools": [strictly(uniqueItems=True)], "tool_choice": "required"},
        "tools.look.parameters.properties.at.uniqueItems",
    ),
    (CHAT, {"tools": [LARGE], "tool_choice": "required"}, "tools"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (TOKENS, {"token_ids": ["a"]}, "token_ids[0]"),
    *((TOKENS, {"sampling_params": wrong}, f"sampling_params.{name}") for name, wrong in SAMPLED.items()),
    (RESPONSES, {"input": [{"role": "user"}]}, "input[0]"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a"}]}, "input[0]"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0]"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    (RESPONSES, {"metadata": {"a": 1}}, "metadata.a"),
    (RESPONSES, {"include": [1]}, "include[0]"),
    (RESPONSES, {"include": [[]]}, "include[0]"),
    *((PREFIXES, {"prompt": "a", "retain": seconds}, "retain") for seconds in (0, 3601)),
    (PREFIXES, {"prompt": "a", "cache_breakpoints": [2]}, "cache_breakpoints"),
    *((path, wrong, None) for path in (PREFIXES, TOKENIZE) for wrong in ({}, {"prompt": "a", **RIGHT[CHAT]})),
    (RERANK, {"documents": [1]}, "documents[0]"),
]
"""Bodies that are refused by another name."""

ROWS = [
    *(
        (path, {field: value}, field)
        for path in WRONG
        for field, values in WRONG[path].items()
        for value in values
    ),
    *INSIDE,
]


@pytest.mark.parametrize(("path", "wrong", "param"), ROWS)
def test_wrong_field_is_named(path: str, wrong: dict[str, Any], param: str | None) -> None:
    service = POOLS if path in (EMBEDDINGS, RERANK, SCORE) else GENERATES
    body = {name: value for name, value in {**RIGHT[path], **wrong}.items() if value is not ...}
    reply = post(app_over(service), path, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert path != TEXT or param in error["message"] or IN_OTHER_WORDS.search(error["message"])
    assert (service.requests, service.budgets) == ([], [])


@pytest.mark.parametrize(
    ("path", "most"),
    [
        *((TEXT, {"n": 16, "prompt": prompt}) for prompt in ("a", ["a"] * 8)),
        (TEXT, {"prompt": ["a"] * 64}),
        (TEXT, {"logprobs": 20}),
        *((TEXT, {"stop": stops}) for stops in (["x"] * 64, "x" * 256)),
        (TEXT, {"stop_token_ids": [5] * 64}),
        (TEXT, {"logit_bias": {"5": 100}}),
        (TEXT, {"priority": -100}),
        (TEXT, {"cache_salt": "s" * 128}),
        (TEXT, {"structured_outputs": {"regex": "a" * PATTERN_BYTES_MAX}}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}),
    ],
)
def test_most_that_is_allowed_is_answered(path: str, most: dict[str, Any]) -> None:
    assert post(app_over(FakeService(saying("a"))), path, {**RIGHT[path], **most}).status_code == 200


@pytest.mark.parametrize("path", [path for path in RIGHT if path != MEMORY])
def test_unknown_model_is_not_found(path: str) -> None:
    body = {**RIGHT[path], "model": "gpt-4"} | {PREFIXES: {"prompt": "a"}, TOKENIZE: {"prompt": "a"}}.get(
        path, {}
    )
    reply = post(app_over(GENERATES), path, {"tokens": [1], **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'keeper'" in error["message"]
