"""Generation parameters: fields and ranges that HTTP bodies and offline calls share.

A null field counts as absent.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from tidemill.cluster.edge.chat.request.validation import problems_of, request_error
from tidemill.workers.messages import BREAKPOINTS_MAX, RETAIN_S_MAX

RETAIN_S = 300.0
"""The time for which a hint without one retains a prompt."""

SESSION_BYTES = 16
SEED_BITS = 63
LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 100.0
BAD_WORDS_MAX = 128
BAD_WORD_CHARS_MAX = 256
LOGIT_BIASES_MAX = 1024
DEFAULT_MAX_TOKENS = 16
"""The default of offline answers, as in vLLM."""

PROMPT_FORMS = "give a text, a list of texts, a list of token ids, or a list of such lists"


def session_of(tenant: str, kind: str, name: str) -> str:
    """Return a digest that names what a tenant retains under `name`."""
    digest = blake2b(repr((tenant, kind, name)).encode(), digest_size=SESSION_BYTES)
    return digest.hexdigest()


def absent_if_null(value: object) -> object:
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    return {name: field for name, field in fields.items() if field is not None}


def valid_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair: send valid Unicode") from None
    return value


def one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def prompts_of(value: object) -> list[str | list[int]]:
    """Return one prompt or several, each as text or token ids, as a list of prompts. Raises ValueError."""
    items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else ()
    if not items or isinstance(items[0], int):
        return [one_prompt(value)]
    return [one_prompt(prompt) for prompt in items]


def one_prompt(value: object) -> str | list[int]:
    """Return a prompt as text or token ids. Raises ValueError."""
    if isinstance(value, str):
        return valid_text(value)
    tokens = list(cast("Sequence[object]", value)) if isinstance(value, (list, tuple)) else [None]
    if not {*map(type, tokens)} <= {int}:
        raise ValueError(PROMPT_FORMS)
    return cast("list[int]", tokens)


def _stop(value: str) -> str:
    if not valid_text(value):
        raise ValueError("a stop string has 1 byte or more")
    return value


def _logit_bias(value: object) -> dict[int, float]:
    """Parse a logit bias: JSON keys are texts, Python's are token ids."""
    items = cast("dict[object, object]", value).items() if isinstance(value, dict) else None
    if items is None or len(items) > LOGIT_BIASES_MAX:
        raise ValueError(f"give an object of at most {LOGIT_BIASES_MAX} token ids, each with its bias")
    return {_token_id(token): _bias(bias) for token, bias in items}


def _token_id(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if type(value) is not int:
        raise ValueError(f"the keys are token ids: {str(value)[:32]!r} is none")
    return value


def _bias(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError("a bias is a number")
    if abs(value) > LOGIT_BIAS_MAX:
        raise ValueError(f"a bias lies in -{LOGIT_BIAS_MAX:g} to {LOGIT_BIAS_MAX:g}")
    return float(value)


Stop = Annotated[str, AfterValidator(_stop)]
TokenCount = Annotated[int, Field(ge=1, le=1 << 31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Breakpoints = Annotated[
    list[Annotated[int, Field(ge=1)]],
    FailFast(),
    Field(
        max_length=BREAKPOINTS_MAX,
        description="where later prompts are likely to leave this one, in characters of a text or in tokens",
    ),
]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(valid_text)]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]


class Fields(BaseModel, strict=True):
    """Fields of a client, of which null ones count as absent."""

    _nulls = model_validator(mode="before")(absent_if_null)


class Params(Fields, allow_inf_nan=False):
    """Parameters of an answer and its end, and of what its prompt leaves in memory. The penalties are
    OpenAI's (over the answer's tokens) and Hugging Face's (repetition: over the prompt's as well)."""

    clamps_max_tokens: ClassVar[bool] = False  # more than fit are as many as fit

    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0  # below it, logits may overflow
    logit_bias: LogitBias = {}
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=BAD_WORD_CHARS_MAX), AfterValidator(valid_text)]],
        FailFast(),
        Field(max_length=BAD_WORDS_MAX, description="texts that the answer never has, as tokens"),
    ] = []
    seed: Annotated[int, Field(ge=-(1 << SEED_BITS), lt=1 << SEED_BITS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Annotated[list[Stop], BeforeValidator(one_or_many)] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    retain: Annotated[
        float | None,
        Field(ge=1, le=RETAIN_S_MAX, description="seconds from the last use for which the prompt is kept"),
    ] = None
    session_id: Annotated[
        Name | None, Field(description="retains the last prompt of a session instead of the one before")
    ] = None

    def retain_s(self) -> float:
        """Return the longest time for which a hint retains the prompt, in seconds; 0.0: no hint does."""
        return self.retain or (RETAIN_S if self.session_id is not None else 0.0)

    def session(self, tenant: str) -> str:
        """Return the digest of the session and its tenant; empty without a session."""
        return "" if self.session_id is None else session_of(tenant, "session", self.session_id)


class SamplingParams(Params):
    """Parameters of offline answers, with vLLM's names. Raises RequestError.

    `logprobs` asks for that many alternatives per token, `prompt_logprobs` for the prompt's.
    `response_format` is OpenAI's, `structured_outputs` vLLM's: one of json, regex, choice, grammar (Lark) and
    json_object. `stop` is a text or a list of texts. `retain`, `session_id` and `cache_breakpoints` are hints
    as in completions: no answer depends on them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: TokenCount | None = DEFAULT_MAX_TOKENS  # pyrefly: ignore[bad-override]  frozen here
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    cache_breakpoints: Breakpoints = []

    @model_validator(mode="wrap")
    @classmethod
    def _refused(cls, fields: object, check: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return check(fields)
        except ValidationError as error:
            raise request_error(problems_of(error)) from None
