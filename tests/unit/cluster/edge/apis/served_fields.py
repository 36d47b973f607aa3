"""The table of docs/api.md: what becomes of each endpoint and field of other servers.

python -m tests.unit.cluster.edge.apis.served_fields    renews it

The fields of OpenAI and Anthropic are those of their SDKs; of vLLM 0.32 and SGLang 0.5 the further ones. What
becomes of a field follows from the code that reads bodies; tests/unit/cluster/edge/apis/test_served_fields.py
sends each to an edge.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from anthropic.types.beta import message_create_params as messages
from fastapi import FastAPI
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import response_create_params as responses

from tests.support.cluster.fake_service import FakeService, app_over, call, saying
from tidemill.cluster.edge.apis.generate import GenerateBody
from tidemill.cluster.edge.apis.messages_body import MessagesBody
from tidemill.cluster.edge.apis.pooling_body import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from tidemill.cluster.edge.apis.responses_body import ResponsesBody
from tidemill.cluster.edge.requests.bodies import UNSUPPORTED, ChatBody, CompletionBody, unsupported_field
from tidemill.workers.messages import RequestError

PAGE = Path(__file__).parents[5] / "docs" / "api.md"
BEGIN, END = "<!-- table: fields -->\n", "<!-- end -->"
COMMAND = "python -m tests.unit.cluster.edge.apis.served_fields"

NO_METHOD = 405
HELLO = [{"role": "user", "content": "Hello!"}]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO}),
    "/v1/completions": (CompletionBody, {"prompt": "Hello!"}),
    "/v1/responses": (ResponsesBody, {"input": "Hello!"}),
    "/v1/messages": (MessagesBody, {"messages": HELLO, "max_tokens": 8}),
    "/v1/embeddings": (EmbeddingBody, {"input": "Hello!"}),
    "/v1/rerank": (RerankBody, {"query": "Hello!", "documents": ["a", "b"]}),
    "/v1/score": (ScoreBody, {"text_1": "Hello!", "text_2": ["a", "b"]}),
    "/inference/v1/generate": (GenerateBody, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}),
}
CHAT, COMPLETION, RESPONSE, MESSAGE, EMBEDDING, RERANK, SCORE, TOKENS = BODIES
NAMES = {path: path.removeprefix("/v1/").partition("/")[0] for path in BODIES} | {TOKENS: "generate"}
OUTCOMES = ("works", "with a database", "ignored", "refused")
GENERATING, POOLING = f"{CHAT} {COMPLETION} {RESPONSE}", f"{EMBEDDING} {RERANK} {SCORE}"
SDKS = {
    CHAT: ("OpenAI", chats.CompletionCreateParamsBase),
    COMPLETION: ("OpenAI", completions.CompletionCreateParamsBase),
    RESPONSE: ("OpenAI", responses.ResponseCreateParamsBase),
    MESSAGE: ("Anthropic", messages.MessageCreateParamsBase),
    EMBEDDING: ("OpenAI", EmbeddingCreateParams),
}
VLLM = {
    GENERATING: """top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos
        skip_special_tokens structured_outputs priority request_id session_id cache_salt kv_transfer_params
        ec_transfer_params vllm_xargs watermarking mm_payload return_mm_kwargs""",
    f"{CHAT} {COMPLETION}": """use_beam_search length_penalty min_tokens spaces_between_special_tokens
        truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
        add_special_tokens return_tokens_as_token_ids return_token_ids return_token_offsets
        routed_experts_prompt_start repetition_detection thinking_token_budget stream_interval""",
    f"{CHAT} {RESPONSE}": "chat_template_kwargs include_reasoning media_io_kwargs mm_processor_kwargs",
    CHAT: """echo add_generation_prompt continue_final_message documents chat_template return_prompt_text
        guided_json guided_regex guided_choice guided_grammar""",
    COMPLETION: "response_format prompt_embeds guided_json guided_regex guided_choice guided_grammar",
    RESPONSE: """logit_bias presence_penalty frequency_penalty seed stop enable_response_messages
        previous_input_messages""",
    POOLING: """truncate_prompt_tokens truncation_side use_activation padding request_id priority
        mm_processor_kwargs cache_salt""",
    EMBEDDING: "add_special_tokens embed_dtype endianness",
    f"{RERANK} {SCORE}": """model user instruction max_tokens_per_query max_tokens_per_doc
        chat_template_kwargs""",
    RERANK: "query documents top_n",
    SCORE: "text_1 text_2",
    TOKENS: """token_ids sampling_params model request_id stream stream_options cache_salt priority features
        token_offsets content_parts reasoning_ended reasoning_parser_kwargs return_token_ids output_mode
        kv_transfer_params ec_transfer_params""",
}
SGLANG = {
    f"{CHAT} {COMPLETION}": """regex ebnf stop_regex no_stop_trim lora_path session_params extra_key rid
        custom_logit_processor custom_params return_hidden_states return_routed_experts
        routed_experts_start_len return_cached_tokens_details ngram_corpus_id images_config bootstrap_host
        bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank""",
    RERANK: "return_documents",
    CHAT: """return_prompt_token_ids return_meta_info task separate_reasoning stream_reasoning input_ids
        reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video""",
    COMPLETION: "json_schema custom_labels",
}
"""Further fields, by the endpoints that have them."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "look", "parameters": {"type": "object"}}
EXAMPLES: dict[str, Any] = {
    "model": "keeper", "messages": HELLO, "prompt": "Hello!", "input": "Hello!", "max_tokens": 8,
    "max_completion_tokens": 8, "max_output_tokens": 8, "frequency_penalty": 0.5, "presence_penalty": 0.5,
    "repetition_penalty": 1.5, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2,
    "logit_bias": {"5": 1}, "stop": ["a"], "stop_sequences": ["a"], "stop_token_ids": [5], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "min_tokens": 1, "bad_words": ["a"],
    "truncate_prompt_tokens": 4, "truncation_side": "left", "prompt_logprobs": 1, "return_token_ids": True,
    "logprobs": 1, f"{CHAT} logprobs": True, "top_logprobs": 0, f"{RESPONSE} top_logprobs": 2,
    "stream": True, "stream_options": {"include_usage": True}, f"{RESPONSE} stream_options": {}, "echo": True,
    "best_of": 2, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'start: "a"',
    "regex": "a", "ebnf": 'root ::= "a"', "json_schema": SCHEMA, "text": {"format": {"type": "json_object"}},
    f"{CHAT} tools": [{"type": "function", "function": TOOL}], "tools": [{"type": "function", **TOOL}],
    f"{MESSAGE} tools": [{"name": "look", "input_schema": {"type": "object"}}], "tool_choice": "auto",
    f"{MESSAGE} tool_choice": {"type": "auto"}, "parallel_tool_calls": False, "reasoning_effort": "low",
    f"{RESPONSE} reasoning": {"effort": "low"}, "chat_template_kwargs": {"a": 1}, "system": "Be short.",
    "instructions": "Be short.", "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"],
    f"{MESSAGE} metadata": {"user_id": "session_00000000-0000-0000-0000-000000000000"},
    "add_generation_prompt": True, "continue_final_message": False, "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low"}, "cache_control": {"type": "ephemeral"}, "priority": 1,
    "session_id": "s", "cache_salt": "a", "extra_key": "a", "prompt_cache_key": "a",
    "prompt_cache_retention": "24h", "store": True, "previous_response_id": "resp_1",
    "conversation": "conv_1", "token_ids": [5, 6], "sampling_params": {"n": 2}, "encoding_format": "base64",
    "dimensions": 4, "use_activation": False,
    "embed_dtype": "float32", "endianness": "little", "instruction": "a", "query": "a", "documents": ["a"],
    "top_n": 1, "text_1": "a", "text_2": "a", "return_documents": False, f"{RESPONSE} prompt": {"id": "a"},
}  # fmt: skip
"""A value of each field that an edge reads, by its name or by endpoint and name."""

STORED = frozenset((f"{RESPONSE} store", f"{RESPONSE} previous_response_id", f"{RESPONSE} conversation"))
"""Fields that need a database."""

ENDPOINTS = {
    "OpenAI": """POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, GET /v1/responses/ID,
        DELETE /v1/responses/ID, GET /v1/responses/ID/input_items, POST /v1/responses/ID/cancel,
        POST /v1/responses/compact, POST /v1/responses/input_tokens, POST /v1/conversations,
        GET /v1/conversations/ID, DELETE /v1/conversations/ID, POST /v1/conversations/ID/items,
        GET /v1/models, GET /v1/models/NAME, POST /v1/embeddings, POST /v1/files, POST /v1/batches,
        GET /v1/batches/ID, GET /v1/chat/completions/ID, POST /v1/moderations, POST /v1/audio/speech,
        POST /v1/audio/transcriptions, POST /v1/images/generations""",
    "Anthropic": "POST /v1/messages, POST /v1/messages/count_tokens, POST /v1/messages/batches",
    "vLLM": """POST /tokenize, POST /detokenize, GET /tokenizer_info, GET /health, GET /ping, GET /load,
        GET /version, GET /server_info, GET /metrics, POST /reset_prefix_cache, POST /score, POST /v1/score,
        POST /rerank, POST /v1/rerank, POST /pooling, POST /classify, POST /inference/v1/generate,
        POST /sleep, POST /wake_up, POST /v1/load_lora_adapter, POST /invocations""",
    "SGLang": """POST /generate, GET /get_model_info, GET /get_server_info, POST /flush_cache,
        GET /health_generate, POST /encode, POST /update_weights_from_disk""",
}


class FieldRow(NamedTuple):
    field: str
    of: str
    path: str
    verdict: str


def fields_of(path: str) -> Iterator[tuple[str, str]]:
    """Yield each field of an endpoint once, with the first server that has it."""
    fields: dict[str, str] = {}
    if path in SDKS:
        of, params = SDKS[path]
        named = [name for name, kind in params.__annotations__.items() if "alias" not in str(kind)]
        fields |= dict.fromkeys(named if path == EMBEDDING else ["stream", *named], of)
    for of, table in (("vLLM", VLLM), ("SGLang", SGLANG)):
        for paths, names in table.items():
            if path in paths.split():
                fields |= {name: fields.get(name, of) for name in names.split()}
    yield from fields.items()


def example(path: str, field: str) -> Any:  # noqa: ANN401 - as JSON has it
    return EXAMPLES.get(f"{path} {field}", EXAMPLES.get(field, "x"))


def verdict(path: str, field: str) -> str:
    """Return what the code that reads bodies does with a field."""
    if f"{path} {field}" in STORED:
        return "with a database"
    kind, least = BODIES[path]
    body = kind.model_validate(least | {field: example(path, field)})
    try:
        asked = body.completion() if path == TOKENS else body.chat() if hasattr(body, "chat") else body
    except RequestError:
        return "refused"
    if unsupported_field(asked.model_extra or {}):
        return "refused"
    match body:
        case ResponsesBody():
            own = body.ignored(is_stored=False)
        case MessagesBody():
            own = body.ignored()
        case GenerateBody():
            own = body.misplaced()
        case PoolingBody():
            own = body.unused()
        case _:
            own = ()
    return "ignored" if field in (*own, *asked.ignored(UNSUPPORTED)) else "works"


def field_rows() -> list[FieldRow]:
    return [
        FieldRow(field, of, path, verdict(path, field)) for path in BODIES for field, of in fields_of(path)
    ]


def endpoints() -> list[tuple[str, str, str]]:
    """Return server, method and path of each endpoint."""
    words = [(of, word.split()) for of, text in ENDPOINTS.items() for word in text.split(",")]
    return [(of, method, path) for of, (method, path) in words]


def is_served(app: FastAPI, method: str, path: str) -> bool:
    """Return whether an edge has an endpoint; others answer that there is none."""
    reply = call(app, method, path, **({"json": {}} if method == "POST" else {}))
    return f"there is no {path}" not in reply.text and reply.status_code != NO_METHOD


def tables() -> str:
    """Return what is served and what not, fields that share all outcomes in one row."""
    app = app_over(FakeService(saying("a")))
    served: dict[str, dict[bool, list[str]]] = {}
    for of, method, path in endpoints():
        kinds = served.setdefault(of, {True: [], False: []})
        kinds[is_served(app, method, path)].append(f"`{method} {path}`")
    lines = ["| endpoints of | served | 404 |", "|---|---|---|"]
    lines += [
        f"| {of} | {', '.join(kinds[True])} | {', '.join(kinds[False])} |" for of, kinds in served.items()
    ]
    outcomes: dict[str, dict[str, list[str]]] = {}
    first: dict[str, str] = {}
    for row in field_rows():
        outcomes.setdefault(row.field, {}).setdefault(row.verdict, []).append(NAMES[row.path])
        first.setdefault(row.field, row.of)
    rows: dict[tuple[str, str], list[str]] = {}
    for field, by in outcomes.items():
        cells = " | ".join(", ".join(by.get(kind, ())) for kind in OUTCOMES)
        rows.setdefault((first[field], cells), []).append(f"`{field}`")
    lines += ["", f"| fields | of | {' | '.join(OUTCOMES)} |", "|---" * (2 + len(OUTCOMES)) + "|"]
    lines += [f"| {', '.join(fields)} | {of} | {cells} |" for (of, cells), fields in rows.items()]
    return re.sub(r"(?<=\|)  (?=\|)", " ", "\n".join(lines)) + "\n"


def in_page() -> str:
    """Return the page with the tables as they should be."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{head}{BEGIN}{tables()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(in_page())
