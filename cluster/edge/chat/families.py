"""The chat formats of model families: what `auto` detects in a model folder, and operators' overrides.
Pure.

A model's format stands in its chat template, so that is examined first.
The family of its architecture decides where the template shows no calls or reasoning.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tidemill.cluster.edge.chat.formats import FORMS, SPOKEN_IN_CHANNELS, THINKING, CallForm, Thinking
from tidemill.cluster.settings import ChatSettings, ReasoningParser, ToolParser


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures with one chat format, by the `model_type` of their config.json."""

    name: str
    model_types: tuple[str, ...]
    tools: ToolParser
    reasoning: ReasoningParser


FAMILIES = (
    Family("Qwen3", ("qwen3", "qwen3_moe", "qwen3_next"), "hermes", "qwen3"),
    Family(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        "qwen3_coder",
        "qwen3",
    ),
    Family("Llama 3", ("llama",), "llama3_json", "none"),
    Family("gpt-oss", ("gpt_oss",), "openai", "openai_gptoss"),
    Family("Granite 4", ("granitemoehybrid",), "hermes", "none"),
    Family("DeepSeek", ("deepseek_v3",), "deepseek_v3", "deepseek_v3"),
    Family("DeepSeek V3.2", ("deepseek_v32",), "deepseek_v32", "deepseek_v3"),
    Family("Gemma 4", ("gemma4", "gemma4_text", "gemma4_unified"), "gemma4", "gemma4"),
    Family("GLM", ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), "glm47", "glm47"),
    Family("Kimi", ("kimi_k2", "kimi_k25"), "kimi_k2", "none"),
    Family("MiniMax", ("minimax_m2",), "minimax_m2", "minimax_m2"),
    Family("Mistral", ("mistral", "mistral3", "ministral3", "mistral4"), "mistral", "none"),
    Family("Nemotron 3", ("nemotron_h",), "qwen3_coder", "nemotron_v3"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The formats of a model's calls and reasoning; None: none is known."""

    form: CallForm | None = None
    reasoning: Thinking | None = None

    @property
    def tags(self) -> frozenset[str]:
        marks = (self.form, self.reasoning)
        return frozenset(tag for mark in marks if mark is not None for tag in mark.tags)

    @property
    def in_channels(self) -> bool:
        return self.reasoning is SPOKEN_IN_CHANNELS or (
            self.form is not None and self.form.body == "channels"
        )


SILENT = Style()


def style_of(model_type: str, template: str, added: Collection[str], chat: ChatSettings) -> Style:
    """Return the formats. `template` is the text of the chat template; `added` holds texts that are one
    token, including tags."""
    family = next((known for known in FAMILIES if model_type in known.model_types), None)
    tools, reasoning = chat.tool_parser, chat.reasoning_parser
    if tools == "auto":
        found = (name for name, form in FORMS.items() if all(sign in template for sign in form.signs))
        tools = next(found, family.tools if family is not None else "none")
    if reasoning == "auto":
        reasoning = _reasoning_in(template, added) or (family.reasoning if family is not None else "none")
    form = FORMS.get(tools)
    return Style(form=form and form.of(template, added), reasoning=THINKING.get(reasoning))


def _reasoning_in(template: str, added: Collection[str]) -> str | None:
    """Return the parser whose tags a model knows. Nothing else shows that a model begins its answers with
    reasoning by itself."""
    if all(sign in template for sign in FORMS["openai"].signs):
        return "openai_gptoss"
    for name, thinking in THINKING.items():
        known = thinking.close and (thinking.close in template or thinking.close in added)
        if known and all(sign in template for sign in thinking.signs):
            return name
    return None
