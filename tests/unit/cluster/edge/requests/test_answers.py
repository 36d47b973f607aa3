"""Answers to clients: streamed and whole, stop strings, seeds, usage, echoed prompts, answers in tokens."""

from dataclasses import replace
from typing import Any

import pytest
from httpx import Response
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import (
    EOS,
    TRACE,
    FakeService,
    app_over,
    call,
    chat,
    complete,
    events_of,
    saying,
    scored,
    tokenizer,
)
from tidemill.workers.messages import Request

TEXT, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
WORDS = " Emma is in the tower. naïve 日本"
STOPS = ("tower", " in the", "Emma is", "Emma", ".", "日", "本")


def test_whole_chat_answer() -> None:
    service = FakeService(saying(" Hi."))
    body = chat(app_over(service), model="keeper", temperature=0, max_tokens=20).json()
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1_700_000_123, "keeper")
    message = {"role": "assistant", "content": " Hi.", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    (request,) = service.requests
    assert (request.max_new_tokens, request.sampling.temperature) == (20, 0)
    assert request.stop_token_ids == (EOS,)
    assert body["usage"]["prompt_tokens"] == len(request.tokens)
    assert body["usage"]["completion_tokens"] == len(tokenizer().encode(" Hi.")) + 1


def body_of(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """A body with these options of a completion, as far as the endpoint has them."""
    if path == TEXT:
        return {"prompt": "Hello", "max_tokens": 1, **options}
    options = {**options, "max_tokens": max(1, options.get("max_tokens", 9))}
    options.pop("echo", None)
    if path == CHAT:
        top = options.pop("logprobs", None)
        more = {} if top is None else {"logprobs": True, "top_logprobs": top}
        return {"messages": [{"role": "user", "content": "Hello!"}], **options, **more}
    options.pop("return_token_ids", None)
    return {"token_ids": [5, 6], "sampling_params": options, "request_id": "r"}


def text_in(choice: dict[str, Any]) -> str:
    answer: dict[str, Any] = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or answer.get("content") or ""


def columns_of(choices: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of a choice, in the form of any of the endpoints."""
    found: dict[str, list[Any]] = {}
    for choice in choices:
        logprobs: dict[str, list[Any] | None] = choice.get("logprobs") or {}
        for name, values in logprobs.items():
            found[name] = [*found.get(name, ()), *(values or ())]
    return {name: values for name, values in found.items() if values}


@settings(max_examples=200, deadline=None)
@given(
    path=st.sampled_from([TEXT, TEXT, CHAT, TOKENS]),
    per_piece=st.integers(1, 5),
    options=st.fixed_dictionaries(
        {
            "stop": st.lists(st.sampled_from([*STOPS, "nowhere", "Hello"]), max_size=4, unique=True),
            "max_tokens": st.integers(0, 30),
        },
        optional={
            "n": st.just(2),
            "logprobs": st.integers(0, 3),
            "echo": st.just(value=True),
            "include_stop_str_in_output": st.just(value=True),
            "return_token_ids": st.just(value=True),
        },
    ),
)
def test_streams_add_up_to_whole_replies(path: str, per_piece: int, options: dict[str, Any]) -> None:
    if "echo" not in options:
        options["max_tokens"] = max(1, options["max_tokens"])
    words = saying(WORDS)
    service = FakeService(lambda asked: [20 + asked.sampling.seed % 50, *words(asked)], per_piece=per_piece)
    app, body = app_over(service), body_of(path, {"seed": 4, **options})
    whole = call(app, "POST", path, json=body).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events_of(call(app, "POST", path, json=streamed))
    assert (done, usage["choices"], usage["usage"]) == ("[DONE]", [], whole["usage"])
    assert {chunk.get("request_id") for chunk in chunks} == {whole.get("request_id")}
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        text = text_in(choice)
        assert "".join(map(text_in, parts)) == text
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert columns_of(parts) == columns_of([choice])
        assert (choice["logprobs"] is None) is ("logprobs" not in options)
        assert all(offset <= len(text) for offset in columns_of([choice]).get("text_offset", ()))
        tokens = [token for part in parts for token in part.get("token_ids", ())]
        assert tokens == choice.get("token_ids", [])
        includes = "include_stop_str_in_output" in options or "echo" in options
        assert includes or not any(stop in text for stop in options["stop"])
    holders = [*chunks, *(part for chunk in chunks for part in chunk["choices"])]
    prompts = [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
    replies = [whole] * len(whole["choices"]) if path == CHAT else whole["choices"]
    expected = [reply["prompt_token_ids"] for reply in replies if "prompt_token_ids" in reply]
    assert prompts == expected, "each choice has the prompt once"
    assert service.open_streams == 0


def test_token_ids_are_where_vllm_has_them() -> None:
    app = app_over(FakeService(saying(WORDS)))
    tokens, prompts = [*tokenizer().encode(WORDS), EOS], ["Hello", "Bob is here."]
    reply = complete(app, prompt=prompts, n=2, return_token_ids=True)
    sent = [tokenizer().encode(prompt) for prompt in prompts for _ in range(2)]
    assert [choice["token_ids"] for choice in reply["choices"]] == [tokens] * 4
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == sent
    service = FakeService(saying(WORDS))
    talk = chat(app_over(service), return_token_ids=True, n=2).json()
    assert [choice["token_ids"] for choice in talk["choices"]] == [tokens] * 2
    assert talk["prompt_token_ids"] == list(service.requests[0].tokens)
    assert not any("prompt_token_ids" in holder for holder in (reply, *talk["choices"]))
    (echo,) = complete(app, echo=True, max_tokens=0, return_token_ids=True)["choices"]
    assert echo["token_ids"] == []
    for asked in (False, None):
        for other in (complete(app, return_token_ids=asked), chat(app, return_token_ids=asked).json()):
            assert "token_ids" not in str(other)


def test_best_answer_keeps_its_own_tokens() -> None:
    """The fake finds low ids likelier: the second answer is returned first."""
    service = FakeService(lambda _: [9 if len(service.requests) == 2 else 90])
    reply = complete(app_over(service), n=1, best_of=2, max_tokens=1, return_token_ids=True)
    assert [choice["token_ids"] for choice in reply["choices"]] == [[9]]


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("a b", 1), (["a", "b c"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2), (["a", [7]], 2)],
)
def test_prompts_come_as_texts_or_token_ids(prompt: object, num_prompts: int) -> None:
    service = FakeService(saying(" ok"))
    body = complete(app_over(service), prompt=prompt, n=2)
    choices = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert choices == [(index, " ok") for index in range(2 * num_prompts)]
    sent = [request.tokens for request in service.requests]
    assert sent[::2] == sent[1::2]
    usage = body["usage"]
    assert usage["prompt_tokens"] == sum(len(tokens) for tokens in sent[::2])
    assert usage["prompt_tokens_details"]["fetched_tokens"] == num_prompts * TRACE.provenance.fetched_tokens


def test_chat_opens_all_its_choices_in_order_before_any_text() -> None:
    chunks = events_of(chat(app_over(FakeService(saying(" Hi."))), stream=True, n=3))[:-1]
    opening = [chunk["choices"][0] for chunk in chunks[:3]]
    assert [choice["index"] for choice in opening] == [0, 1, 2]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in opening)
    assert all(chunk["choices"][0]["delta"].keys() == {"content"} for chunk in chunks[3:])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_seeds_repeat_when_given_and_differ_when_not() -> None:
    service = FakeService(saying(" a"))
    app = app_over(service)
    for _ in range(2):
        complete(app, n=2, seed=-5)
    for _ in range(2):
        complete(app, n=2)
    seeds = [request.sampling.seed for request in service.requests]
    assert seeds[0:2] == seeds[2:4]
    assert len(set(seeds[2:])) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(("num_tokens", "cached_tokens"), [(9, 9 - 4 - 1), (3, 0)])
def test_usage_has_the_sources_of_the_prompt(num_tokens: int, cached_tokens: int) -> None:
    usage = complete(app_over(FakeService(saying(" a"))), prompt=[5] * num_tokens)["usage"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": cached_tokens,
        "prefilled_tokens": 4,
        "fetched_tokens": 3,
        "replayed_tokens": 1,
        "reused_tokens": 2,
    }


def test_messages_may_hold_text_parts_nulls_and_a_developer() -> None:
    service = FakeService(saying(" a"))
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    for role, content, more in (("developer", parts, {"stop": None}), ("system", "Hello!", {"n": None})):
        messages = [{"role": role, "content": "Be kind."}, {"role": "user", "content": content}]
        chat(app_over(service), messages=messages, **more)
    assert service.requests[0].tokens == service.requests[1].tokens


def test_request_id_is_echoed_or_made() -> None:
    app = app_over(FakeService(saying(" a")))

    def echoed(path: str, given: bytes) -> str:
        return call(app, "GET", path, headers={b"x-request-id": given}).headers["x-request-id"]

    assert (echoed("/version", b"mine-7"), echoed("/nowhere", b"e")) == ("mine-7", "e")
    for odd in (b"", b"x" * 129, b"\xc3\xa9"):
        assert echoed("/version", odd).startswith("id")


def test_small_endpoints() -> None:
    app = app_over(FakeService(saying(" a")))
    models = call(app, "GET", "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["keeper"]
    assert call(app, "GET", "/v1/models/keeper").json() == models["data"][0]
    assert call(app, "GET", "/v1/models/a/b").status_code == 404
    assert call(app, "GET", "/health").json() == {"status": "ok"}
    assert call(app, "GET", "/version").json().keys() == {"version"}
    assert "page/docs.js" in call(app, "GET", "/docs").text
    assert "/v1/chat/completions" in call(app, "GET", "/openapi.json").json()["paths"]
    cluster = call(app, "GET", "/cluster").json()
    assert [worker["info"]["name"] for worker in cluster["workers"]] == ["prefill-0", "decode-0"]
    assert cluster["workers"][0]["load"]["memory"]["free"] == 3 << 20
    assert cluster["frontend"]["pid"] > 0


PROMPT = "Bob is now at the 日本 mill."
IDS = tokenizer().encode(PROMPT)
HERE = " Emma is here."


@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("per_piece", [1, 7])
def test_echo_with_logprobs(prompt: str | list[int], per_piece: int) -> None:
    app = app_over(FakeService(saying(HERE), per_piece=per_piece))
    choice = complete(app, prompt=prompt, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == PROMPT + HERE
    tokens = [*IDS, *tokenizer().encode(HERE), EOS]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, *(scored(token, 1).logprob for token in tokens[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [1 + (token != 10) for token in tokens[1:]]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize(("max_tokens", "count"), [(0, 0), (1, 1)])
def test_text_is_scored_as_harnesses_request_it(max_tokens: int, count: int) -> None:
    """The requests are those of evaluation harnesses. The last token is a drawn one, or one of the prompt."""
    service = FakeService(saying(HERE))
    reply = complete(app_over(service), prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens)
    choice = reply["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(IDS) + count
    assert reply["usage"]["completion_tokens"] == count
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(PROMPT)
    assert (choice["text"] == PROMPT) is (count == 0)
    assert (service.requests[0].max_new_tokens, service.requests[0].sampling.prompt_logprobs) == (1, 1)


def test_stop_token_that_was_drawn_is_one_of_the_echoed_tokens() -> None:
    """Otherwise a client that removes the last one would remove one of the prompt's."""
    app = app_over(FakeService(saying("")))
    (choice,) = complete(app, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    assert len(choice["logprobs"]["tokens"]) == len(IDS) + 1
    assert complete(app, logprobs=1)["choices"][0]["logprobs"]["tokens"] == []


def test_echo_without_logprobs_scores_nothing() -> None:
    service = FakeService(saying(HERE))
    choices = complete(app_over(service), prompt=["Hello", "Bob"], n=2, echo=True)["choices"]
    texts = [(choice["text"], choice["logprobs"]) for choice in choices]
    assert texts == [(f"{name}{HERE}", None) for name in ("Hello", "Hello", "Bob", "Bob")]
    assert {request.sampling.prompt_logprobs for request in service.requests} == {None}


@pytest.mark.parametrize("logprobs", [None, 0, 4])
def test_prompt_logprobs_in_the_form_of_vllm(logprobs: int | None) -> None:
    service = FakeService(saying(HERE))
    reply = complete(
        app_over(service),
        prompt=[PROMPT, "Bob"],
        prompt_logprobs=2,
        echo=logprobs is not None,
        logprobs=logprobs,
    )
    scores = reply["choices"][0]["prompt_logprobs"]
    assert len(scores) == len(IDS)
    assert scores[0] is None
    for token, entries in zip(IDS[1:], scores[1:], strict=True):
        assert entries[str(token)]["logprob"] == scored(token, 2).logprob or token in (10, 11)
        assert [entries[str(10 + place)]["rank"] for place in range(2)] == [1, 2]
        assert len(entries) == (2 if token in (10, 11) else 3)
    assert len(reply["choices"][1]["prompt_logprobs"]) == len(tokenizer().encode("Bob"))
    assert service.requests[0].sampling.prompt_logprobs == max(2, logprobs or 0)
    if logprobs == 0:
        assert {len(top or "a") for top in reply["choices"][0]["logprobs"]["top_logprobs"]} == {1}


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices() -> None:
    service = FakeService(saying(HERE))
    reply = chat(app_over(service), prompt_logprobs=0).json()
    (request,) = service.requests
    assert [list(scores or "-") for scores in reply["prompt_logprobs"]] == [
        ["-"],
        *([str(token)] for token in request.tokens[1:]),
    ]
    assert "prompt_logprobs" not in chat(app_over(service)).json()


def best_script(request: Request) -> list[int]:
    """Each answer is one token again and again: the lower its id, the likelier the fake finds it."""
    return [100 - request.sampling.seed % 50] * (1 + request.sampling.seed % 3)


@pytest.mark.parametrize(("n", "best_of"), [(1, 1), (1, 6), (3, 6), (4, 4)])
def test_best_answers_come_in_order(n: int, best_of: int) -> None:
    service = FakeService(best_script)
    reply = complete(app_over(service), prompt=["Hello", "Bob"], n=n, best_of=best_of, max_tokens=5)
    wanted: list[str] = []
    for start in (0, best_of):
        answers = [best_script(request) for request in service.requests[start : start + best_of]]
        if n < best_of:
            answers.sort(key=lambda ranked: ranked[0])
        wanted += ["".join(tokenizer().piece(token).decode() for token in answer) for answer in answers[:n]]
    choices = [(choice["index"], choice["text"], choice["logprobs"]) for choice in reply["choices"]]
    assert choices == [(index, text, None) for index, text in enumerate(wanted)]
    drawn = sum(len(best_script(request)) for request in service.requests)
    assert reply["usage"]["completion_tokens"] == drawn, "they were drawn, returned or not"


TOWER = " Emma is in the tower"
ASKED = tokenizer().encode("Where is Emma?")
ANSWERED = [*tokenizer().encode(TOWER), EOS]


def sent(service: FakeService, sampling_params: dict[str, Any] | None = None, **fields: object) -> Response:
    body = {"token_ids": ASKED, "sampling_params": sampling_params or {}, **fields}
    return call(app_over(service), "POST", TOKENS, json=body)


def test_answer_is_the_tokens_of_a_completion() -> None:
    service = FakeService(saying(TOWER))
    reply = sent(service, {"n": 2, "seed": 7, "temperature": 0.5}, request_id="r-1").json()
    assert [choice["token_ids"] for choice in reply["choices"]] == [ANSWERED] * 2
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    assert {choice["logprobs"] for choice in reply["choices"]} == {None}
    assert (reply["request_id"], reply["kv_transfer_params"], reply["prompt_logprobs"]) == ("r-1", None, None)
    assert reply["usage"]["completion_tokens"] == 2 * len(ANSWERED)
    [first, _] = service.requests
    assert first.tokens == tuple(ASKED)
    assert first.sampling.temperature == 0.5
    assert first.max_new_tokens > 100, "as many as fit"


def test_parameters_and_hints_are_those_of_a_completion() -> None:
    """Each request is the one that /v1/completions makes of the same fields."""
    hints: dict[str, Any] = {"priority": -3, "cache_salt": "team-a", "session_id": "s", "retain": 60}
    sampling: dict[str, Any] = {
        "max_tokens": 5,
        "min_tokens": 1,
        "top_p": 0.5,
        "top_k": 4,
        "seed": 3,
        "stop": ["is"],
        "stop_token_ids": [9],
        "logit_bias": {"4": 2.0},
        "bad_words": ["Tom"],
        "repetition_penalty": 1.1,
        "structured_outputs": {"choice": ["a", "b"]},
    }
    ours, theirs = FakeService(saying(TOWER)), FakeService(saying(TOWER))
    reply = sent(ours, {**sampling, "detokenize": False, "output_kind": 2}, **hints)
    assert reply.headers.get("x-tidemill-ignored") is None
    call(app_over(theirs), "POST", "/v1/completions", json={"prompt": ASKED, **sampling, **hints})
    [request], [completion] = ours.requests, theirs.requests
    assert request == replace(completion, request_id=request.request_id)


def test_logprobs_name_tokens() -> None:
    reply = sent(FakeService(saying(TOWER)), {"logprobs": 1, "prompt_logprobs": 0}).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ANSWERED]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in content)
    assert len(reply["prompt_logprobs"]) == len(ASKED)
    assert reply["prompt_logprobs"][0] is None


def test_fields_of_completions_without_an_effect_are_named() -> None:
    reply = sent(FakeService(saying(TOWER)), {"allowed_token_ids": None}, temperature=0.5, echo=True, oh=1)
    assert reply.status_code == 200
    assert set(reply.headers["x-tidemill-ignored"].split(", ")) == {"temperature", "echo", "oh"}
