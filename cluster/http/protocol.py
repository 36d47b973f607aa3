"""The bodies that clients send: fields, ranges, and fields that are refused because they change the answer.

A field that is null counts as absent. Unknown fields are ignored.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

CHOICES_MAX = 16
PROMPTS_MAX = 64
STOPS_MAX = 4
STOP_BYTES_MAX = 256
STOP_TOKENS_MAX = 64
SEED_BITS = 63
PROMPT_FORMS = "give a text, a list of texts, a list of token ids, or a list of such lists"


def _absent_if_null(value: object) -> object:
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    return {name: field for name, field in fields.items() if field is not None}


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair: send valid Unicode") from None
    return value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _stop(value: str) -> str:
    if not 0 < len(_text(value).encode()) <= STOP_BYTES_MAX:
        raise ValueError(f"a stop string has 1 to {STOP_BYTES_MAX} bytes")
    return value


def _content(value: object) -> object:
    """A list of text parts becomes one text."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in cast("list[object]", value):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError(
                    'only text is supported: give a string or parts of {"type": "text", "text": ...}'
                )
    return "".join(texts)


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, each as text or as token ids, become a list of prompts."""
    items: list[object] = cast("list[object]", value) if isinstance(value, list) else []
    prompts: list[object] = items if items and not isinstance(items[0], int) else [value]
    if len(prompts) > PROMPTS_MAX:
        raise ValueError(f"{len(prompts)} prompts in one request: send at most {PROMPTS_MAX}")
    return [_prompt(prompt) for prompt in prompts]


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, list):
        raise ValueError(PROMPT_FORMS)  # noqa: TRY004 - pydantic reports ValueError to the client, not TypeError
    tokens = cast("list[object]", value)
    if any(type(token) is not int for token in tokens):
        raise ValueError(PROMPT_FORMS)
    return cast("list[int]", tokens)


Content = Annotated[str, BeforeValidator(_content), AfterValidator(_text)]
Stop = Annotated[str, AfterValidator(_stop)]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema({"description": PROMPT_FORMS, "type": ["string", "array"]}),
]


class Turn(BaseModel):
    """One message of a chat. Fields that clients carry along (name, refusal, audio, ...) are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class StreamOptions(BaseModel):
    """What a stream says besides text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False

    _nulls = model_validator(mode="before")(_absent_if_null)


class Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Annotated[str, Field(max_length=256)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(1 << SEED_BITS), lt=1 << SEED_BITS)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] = 1
    stop: Annotated[list[Stop], FailFast(), Field(max_length=STOPS_MAX), BeforeValidator(_one_or_many)] = (
        Field(default=[], description="a text or a list of texts that end the answer and are not part of it")
    )
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=STOP_TOKENS_MAX)] = []
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")] | None = None
    user: str | None = None

    _nulls = model_validator(mode="before")(_absent_if_null)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Turn], FailFast(), Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Prompts


UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0, 0.0),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that change the answer and are not served yet, with the values that change nothing."""


def unsupported_field(extra: dict[str, object]) -> str | None:
    """The first field of `extra` that asks for something that is not served."""
    for name, value in extra.items():
        harmless = UNSUPPORTED.get(name)
        # compared with its type: `logprobs: 0` asks for something, `logprobs: false` does not
        if harmless is not None and not any(type(value) is type(same) and value == same for same in harmless):
            return name
    return None
