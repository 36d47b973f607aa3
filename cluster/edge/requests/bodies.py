"""The bodies that clients send: fields, ranges, and refused fields that would change the answer.

A null field counts as absent, and unknown fields are named in the reply's header.
cluster/edge/chat/request/params.py has what offline calls use as well; the limits here are those of one
HTTP request.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, cast

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

from tidemill.cluster.edge.chat.request.hints import HintedParams, Mark
from tidemill.cluster.edge.chat.request.messages import ChatMessage, bounded_arguments
from tidemill.cluster.edge.chat.request.params import (
    LOGPROBS_MAX,
    PROMPT_FORMS,
    RETAIN_S,
    Breakpoints,
    Fields,
    Stop,
    TokenCount,
    one_or_many,
    one_prompt,
    prompts_of,
)
from tidemill.cluster.edge.chat.request.structured import FORM_OF, Asked, asked_of
from tidemill.cluster.edge.chat.request.tools import TOOLS_MAX, Allowed, Tool, ToolChoice
from tidemill.workers.messages import RequestError

CHOICES_MAX = 16
MESSAGES_MAX = 4096
PROMPTS_MAX = 64
STOPS_MAX = 64
STOP_BYTES_MAX = 256
STOP_TOKENS_MAX = 64


def _some_or_many(value: object) -> object:
    """Return stop strings without empty ones, which end nothing."""
    stops = one_or_many(value)
    return [stop for stop in cast("list[object]", stops) if stop != ""] if isinstance(stops, list) else stops


def _short(value: str) -> str:
    if len(value.encode()) > STOP_BYTES_MAX:
        raise ValueError(f"a stop string has 1 to {STOP_BYTES_MAX} bytes")
    return value


def _prompts(value: object) -> list[str | list[int]]:
    prompts = prompts_of(value)
    if len(prompts) > PROMPTS_MAX:
        raise ValueError(f"{len(prompts)} prompts in one request: send at most {PROMPTS_MAX}")
    return prompts


def _none_if_false(value: object) -> object:
    return None if value is False else value


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema({"description": PROMPT_FORMS, "type": ["string", "array"]}),
]
Messages = Annotated[
    list[ChatMessage], FailFast(), Field(max_length=MESSAGES_MAX), BeforeValidator(bounded_arguments)
]
LogprobCount = Annotated[int, Field(ge=0, le=LOGPROBS_MAX)]


class StreamOptions(Fields):
    """Options of a stream."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(HintedParams, extra="allow"):
    """The fields of both endpoints. Those of FORM_OF are other names for parts of structured_outputs."""

    model: Annotated[str, Field(max_length=256)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] = 1
    stop: Annotated[
        list[Annotated[Stop, AfterValidator(_short)]],
        FailFast(),
        Field(max_length=STOPS_MAX),
        BeforeValidator(_some_or_many),
    ] = Field(default=[], description="a text or a list of texts that end the answer and are not part of it")
    stop_token_ids: Annotated[list[int], FailFast(), Field(max_length=STOP_TOKENS_MAX)] = Field(default=[])
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=-1, le=1 << 31, description="number of tokens of the prompt that are kept; -1: as many as fit"
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, Field(description="where the prompt is cut: at its start if not set")
    ] = None
    return_token_ids: Annotated[bool, Field(description="whether the reply has the ids of all tokens")] = (
        False
    )
    skip_special_tokens: Annotated[bool, Field(description="false: their texts are part of the answer's")] = (
        True
    )
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None

    def asked(self) -> Asked | None:
        """Return the constraint of the answer. Raises RequestError."""
        others: dict[str, object] = {field: getattr(self, field) for field in FORM_OF}
        return asked_of(self.response_format, self.structured_outputs, others)


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage],
        FailFast(),
        Field(min_length=1, max_length=MESSAGES_MAX),
        BeforeValidator(bounded_arguments),
    ]
    tools: Annotated[list[Tool], FailFast(), Field(max_length=TOOLS_MAX)] = Field(default=[])
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={})
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount = 0

    @model_validator(mode="after")
    def _allowed(self) -> Self:
        """Leave the tools that tool_choice allows."""
        if isinstance(self.tool_choice, Allowed):
            allowed = self.tool_choice
            self.tools = [tool for tool in self.tools if tool.function.name in allowed.names]
            self.tool_choice = allowed.mode
        return self

    def restrictions(self) -> tuple[str, ...]:
        """Return the fields that restrict an answer in words."""
        fields = ("response_format", "structured_outputs", *FORM_OF)
        return tuple(field for field in fields if getattr(self, field) not in (None, {"type": "text"}))

    def marks(self) -> list[Mark]:
        tools = [Mark(0, tool.cache_control) for tool in self.tools if tool.cache_control is not None]
        return [*tools, *(mark for message in self.messages for mark in message.marks)]

    def effort(self) -> dict[str, object]:
        """Return the variables of chat templates for it, which have different names for it."""
        if self.reasoning_effort is None:
            return {}
        thinks = self.reasoning_effort != "none"
        named = {"reasoning_effort": self.reasoning_effort} if thinks else {}
        return {"enable_thinking": thinks, "thinking": thinks, **named}

    def template_options(self) -> dict[str, object]:
        """Return the variables of the chat template."""
        return {**self.effort(), **self.chat_template_kwargs}

    def thinks(self) -> bool | None:
        """Return whether the model is asked to think or not to; None: neither."""
        options = self.template_options()
        asked = [options[name] for name in ("enable_thinking", "thinking") if name in options]
        return False if False in asked or self.continue_final_message else True in asked or None

    def num_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None: no logprobs. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: set it to true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None


class AgentChat(ChatBody):
    """A chat of an agent, which asks for as many tokens as its own model has, whatever fits here."""

    clamps_max_tokens = True


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    prompt_param: ClassVar[Literal["prompt", "token_ids"]] = "prompt"

    prompt: Prompts
    logprobs: Annotated[LogprobCount | None, BeforeValidator(_none_if_false)] = None
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31, description="0: the echo alone")] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    cache_breakpoints: Breakpoints = Field(default=[])

    def num_drawn(self) -> int:
        """Return the number of answers, of which the best `n` are returned. Raises RequestError."""
        drawn = self.n if self.best_of is None else self.best_of
        if drawn < self.n:
            raise RequestError(f"{drawn} answers have no best {self.n}: raise best_of", param="best_of")
        if drawn > self.n and self.stream:
            raise RequestError("the best answers are known at the end: do not stream them", param="best_of")
        return drawn

    def num_tokens(self) -> int | None:
        """Return the most tokens to draw; an echo alone needs one, which is not returned. Raises
        RequestError."""
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 asks for nothing: set echo to true", param="max_tokens")
        return 1 if self.max_tokens == 0 else self.max_tokens


def _one_of_them(body: "TokenizeBody | PrefixBody") -> "TokenizeBody | PrefixBody":
    if bool(body.messages) is (body.prompt is not None):
        raise ValueError("give a prompt, or messages")
    return body


class TokenizeBody(ChatBody):
    """The body of POST /tokenize: `messages` as for a chat, or a `prompt`."""

    messages: Messages = Field(default=[])
    prompt: str | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _one_of_them(self)
        return self


PREFIX_FIELDS = frozenset(
    (
        *("model", "messages", "prompt", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
        *("add_generation_prompt", "continue_final_message", "retain", "cache_breakpoints"),
        *("cache_salt", "extra_key", "priority", "nvext"),
    )
)
"""The fields with an effect on a prefix."""


class PrefixBody(ChatBody):
    """The body of POST /v1/prefixes: `messages` as for a chat, or a `prompt`; nothing is answered to them."""

    messages: Messages = Field(default=[])
    prompt: Annotated[str | list[int] | None, PlainValidator(one_prompt)] = None
    cache_breakpoints: Breakpoints = Field(default=[])

    def retain_s(self) -> float:
        return self.retain or RETAIN_S

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _one_of_them(self)
        return self

    def unused(self) -> tuple[str, ...]:
        """Return the fields of a chat without an effect here."""
        known = self.model_fields_set - set(self.model_extra or {})
        return tuple(sorted(known - PREFIX_FIELDS))


class DetokenizeBody(BaseModel, strict=True, extra="ignore"):
    """The body of POST /detokenize."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Annotated[list[int], FailFast()]


UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "echo": (False,),
    "features": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "input_ids": ([],),
    "kv_transfer_params": (),
    "lora_path": (),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "previous_input_messages": ([],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_params": (),
    "stop_regex": ([],),
    "suffix": ("",),
    "task": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
}
"""Fields that change the answer and are not supported, with the values that change nothing."""


def unsupported_field(extra: dict[str, object]) -> str | None:
    """Return a field of `extra` that asks for something unsupported."""
    for name, harmless in UNSUPPORTED.items():
        # compared with its type, because `echo: 0` does not mean false
        if name in extra and not any(
            type(extra[name]) is type(same) and extra[name] == same for same in harmless
        ):
            return name
    return None
