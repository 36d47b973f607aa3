"""The model families: how a template identifies each, and how answers are parsed, whole and letter by
letter."""

from dataclasses import replace

import pytest

from tests.unit.cluster.edge.chat.spoken import Spoken, check_spoken, plain
from tidemill.cluster.edge.chat.families import FAMILIES, style_of
from tidemill.cluster.edge.chat.formats import FINAL, FORMS, THINKING
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.settings import AUTO, ChatSettings

SCHEMAS = {
    "look": {"type": "object", "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}}},
    "wait": {"type": "object", "properties": {"s": {"type": "integer"}}},
}
LOOK = ("look", '{"at": "the harbor"}')
WAIT = ("wait", '{"s": 3}')


def deepseek(text: str) -> str:
    """Return the text with DeepSeek's tags, which look like `<|tool_sep|>`."""
    for word in ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep"):
        text = text.replace(f"<|{word}|>", f"<\uff5c{word.replace('_', chr(0x2581))}\uff5c>")
    return text


def manner_of(model_type: str, template: str, *, begun: str = "") -> OutputFormat:
    """Return the format of an answer with tools, whose prompt ends in `begun`."""
    style = style_of(model_type, template, (), AUTO)
    return OutputFormat(
        reasoning=style.reasoning,
        thinking=style.reasoning is not None and style.reasoning.open_behind(begun),
        form=style.form,
        schemas=SCHEMAS,
        channels=style.in_channels,
    )


QWEN3 = "{% if tools %}<tool_call>{% endif %}...{{ '<think>' }}...</think>"
QWEN3_CODER = "{% if tools %}<tool_call><function=name><parameter=p>{% endif %}"
LLAMA = """{% if tools %}Answer in the format {"name": its name, "parameters": its arguments}{% endif %}"""
LLAMA_PYTHON = "{% if tools %}[func_name1(name=value), ...]{% endif %}"
GPT_OSS = "<|start|>developer<|message|>{% if tools %}...{% endif %}<|channel|>final<|message|>"
GRANITE_4 = "{% if tools %}<tool_call>{% endif %}"
GRANITE_3 = "{% if tools %}<|tool_call|>{% endif %} Here is my thought process: ... Here is my response: ..."
DEEPSEEK_V3 = deepseek("{% if tools %}<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f ```json")
DEEPSEEK_V31 = deepseek("{% if tools %}<|tool_call_begin|>f<|tool_sep|>{} <think> </think>")

HERMES_LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "the harbor"}}\n</tool_call>'
HERMES_WAIT = '<tool_call>\n{"name": "wait", "arguments": {"s": 3}}\n</tool_call>'
XML_LOOK = "<tool_call>\n<function=look>\n<parameter=at>\nthe harbor\n</parameter>\n</function>\n</tool_call>"
V3_CALLS = deepseek(
    "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>look\n```json\n"
    '{"at": "the harbor"}\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>wait\n```json\n'
    '{"s": 3}\n```<|tool_call_end|><|tool_calls_end|>'
)
V31_CALLS = deepseek(
    '<|tool_calls_begin|><|tool_call_begin|>look<|tool_sep|>{"at": "the harbor"}<|tool_call_end|>'
    '<|tool_call_begin|>wait<|tool_sep|>{"s": 3}<|tool_call_end|><|tool_calls_end|>'
)
GPT_OSS_THINKS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
GPT_OSS_CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "the harbor"}'


GLM_45 = "{% if tools %}<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}{% endif %} <think></think>"
GLM_47 = "{% if tools %}<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}{% endif %} <think></think>"
KIMI = "{% if tools %}<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}{% endif %}"
KIMI_THINKS = KIMI + "<think></think>"
MINIMAX = (
    "{% if tools %}{% set begin = '<minimax:tool_call>' %}<invoke name=\"n\">{% endif %} <think> </think>"
)
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]f[ARGS]{} [THINK]...[/THINK]"
MISTRAL_V3 = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["
GEMMA = "{% if tools %}<|tool_call>call:f{}<tool_call|>{% endif %} <|channel>thought\n<channel|>"
DEEPSEEK_V32 = (
    "{% set dsml = '\uff5cDSML\uff5c' %}{% if tools %}<{{ dsml }}function_calls>{% endif %} <think></think>"
)
NEMOTRON = QWEN3_CODER + "<think></think>"

GLM_CALLS = (
    "\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the harbor</arg_value>\n</tool_call>"
    "<tool_call>wait<arg_key>s</arg_key><arg_value>3</arg_value></tool_call>"
)
KIMI_CALLS = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": '
    '"the harbor"}<|tool_call_end|><|tool_call_begin|>functions.wait:1<|tool_call_argument_begin|>{"s": 3}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
MINIMAX_CALLS = (
    '\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">the harbor</parameter>\n</invoke>\n'
    '<invoke name="wait">\n<parameter name="s">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
MISTRAL_CALLS = '[TOOL_CALLS]look[ARGS]{"at": "the harbor"}[TOOL_CALLS]wait[ARGS]{"s": 3}'
MISTRAL_V3_CALLS = (
    '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "the harbor"}, "id": "a1b2c3d4e"}, '
    '{"name": "wait", "arguments": {"s": 3}, "id": "a1b2c3d4f"}]'
)
GEMMA_CALLS = (
    '<|tool_call>call:look{at:<|"|>the harbor<|"|>}<tool_call|><|tool_call>call:wait{s:3}<tool_call|>'
)
DSML_CALLS = """\n\n<%function_calls>
<%invoke name="look">
<%parameter name="at" string="true">the harbor</%parameter>
</%invoke>
<%invoke name="wait">
<%parameter name="s" string="false">3</%parameter>
</%invoke>
</%function_calls>""".replace("%", "\uff5cDSML\uff5c")

LLAMA_WAIT = '{"parameters": "{\\"s\\": 3}", "name": "wait"}'
LLAMA_BOTH = (
    '\n<|python_tag|>{"type": "function", "name": "look", "parameters": {"at": "the harbor"}}; '
    '{"name": "wait", "parameters": {"s": 3}}'
)
LLAMA_4 = '<|python_start|>[look(at="(\\"[", far=True), look(far=null)]<|python_end|>'
LLAMA_4_CALLS = [("look", plain({"at": '("[', "far": True})), ("look", '{"far": null}')]
GPT_OSS_WAIT = (
    f"{GPT_OSS_THINKS}<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
    ' to=functions.wait<|channel|>commentary json<|message|>{"s": 3}<|call|>'
)
GRANITE_CALLS = (
    '<|tool_call|>[{"name": "look", "arguments": {"at": "the harbor"}}, '
    '{"arguments": {"s": 3}, "name": "wait"}]'
)
GRANITE_THINKS = "Here is my thought process:\nHm.\nHere is my response:\nYes."

IN_CHANNELS: list[tuple[str, Spoken]] = [
    (f"{GPT_OSS_THINKS}<|channel|>final<|message|>Yes.", ("Hm.", "Yes.", [])),
    (f"{GPT_OSS_THINKS}{GPT_OSS_CALL}", ("Hm.", "", [LOOK])),
    (GPT_OSS_WAIT, ("Hm.", "So.", [WAIT])),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ("<|channel|>commentary to=functions.wait<|message|>", ("", "", [("wait", "{}")])),
    ("Yes.", ("", "Yes.", [])),
    ("<|channel|>fin", ("", "", [])),
]
ANSWERS: list[tuple[str, str, str, str, Spoken]] = [
    ("qwen3_moe", QWEN3, "", "<think>\nHm.\n</think>\n\nYes.", ("Hm.\n", "Yes.", [])),
    ("qwen3", QWEN3, "<think>\n", f"Hm.</think>\n\n{HERMES_LOOK}", ("Hm.", "", [LOOK])),
    ("qwen3_next", QWEN3, "", f"So.\n{HERMES_LOOK}\n{HERMES_WAIT}", ("", "So.\n", [LOOK, WAIT])),
    ("qwen3_5", QWEN3 + QWEN3_CODER, "<think>", f"Hm.</think>{XML_LOOK}", ("Hm.", "", [LOOK])),
    ("qwen3_5_moe", QWEN3_CODER, "", f"So.{XML_LOOK}", ("", "So.", [LOOK])),
    ("llama", LLAMA, "", '{"name": "look", "parameters": {"at": "the harbor"}}', ("", "", [LOOK])),
    ("llama", LLAMA, "", LLAMA_BOTH, ("", "\n", [LOOK, WAIT])),
    ("llama", LLAMA, "", LLAMA_WAIT, ("", "", [WAIT])),
    *(
        ("llama", template, "", words, ("", words, []))
        for template, words in (
            (LLAMA, '{"a": {"b": "}"}} is JSON'),
            (LLAMA, 'Say {"name": "look", "parameters": {}}'),
            (LLAMA, "<|python_tag|>print(1)"),
            (LLAMA_PYTHON, "[1] and [2]"),
            (LLAMA_PYTHON, "[see (this) one]"),
            (LLAMA_PYTHON, "[look(at=harbor)]"),
        )
    ),
    ("llama", LLAMA_PYTHON, "", "[look(at='the harbor'), wait(s=3)]", ("", "", [LOOK, WAIT])),
    ("llama4_text", LLAMA_PYTHON, "", LLAMA_4, ("", "", LLAMA_4_CALLS)),
    *(("gpt_oss", GPT_OSS, "", text, parsed) for text, parsed in IN_CHANNELS),
    ("granitemoehybrid", GRANITE_4, "", f"So.\n{HERMES_LOOK}", ("", "So.\n", [LOOK])),
    ("granite", GRANITE_3, "", GRANITE_CALLS, ("", "", [LOOK, WAIT])),
    ("granite", GRANITE_3, "", GRANITE_THINKS, ("Hm.\n", "Yes.", [])),
    ("deepseek_v3", DEEPSEEK_V3, "", f"So.{V3_CALLS}", ("", "So.", [LOOK, WAIT])),
    ("deepseek_v3", DEEPSEEK_V31, "<think>", f"Hm.</think>{V31_CALLS}", ("Hm.", "", [LOOK, WAIT])),
    ("deepseek_v3", DEEPSEEK_V31, "</think>", "Yes.", ("", "Yes.", [])),
    ("glm4_moe", GLM_45, "<|assistant|>", f"\n<think>Hm.</think>{GLM_CALLS}", ("Hm.", "", [LOOK, WAIT])),
    ("glm4_moe", GLM_45, "<think></think>", f"So.{GLM_CALLS}", ("", "So.\n", [LOOK, WAIT])),
    ("glm4_moe", GLM_47, "<|assistant|><think>", f"Hm.</think>{GLM_CALLS}", ("Hm.", "", [LOOK, WAIT])),
    ("glm4_moe", GLM_47, "<|assistant|></think>", "Yes.", ("", "Yes.", [])),
    ("kimi_k2", KIMI, "<|im_middle|>", f"So.{KIMI_CALLS}", ("", "So.", [LOOK, WAIT])),
    ("kimi_k2", KIMI_THINKS, "<|im_middle|>", f"<think>Hm.</think>{KIMI_CALLS}", ("Hm.", "", [LOOK, WAIT])),
    ("kimi_k2", KIMI_THINKS, "<|im_middle|>", f"Hm.{KIMI_CALLS}", ("Hm.", "", [LOOK, WAIT])),
    ("kimi_k25", KIMI_THINKS, "<think></think>", "Yes.", ("", "Yes.", [])),
    ("minimax_m2", MINIMAX, "ai\n<think>\n", f"Hm.\n</think>{MINIMAX_CALLS}", ("Hm.\n", "", [LOOK, WAIT])),
    ("minimax_m2", "", "]~b]ai\n", "Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("mistral3", MISTRAL, "[/INST]", f"[THINK]Hm.[/THINK]So.{MISTRAL_CALLS}", ("Hm.", "So.", [LOOK, WAIT])),
    ("mistral", MISTRAL_V3, "[/INST]", MISTRAL_V3_CALLS, ("", "", [LOOK, WAIT])),
    ("gemma4", GEMMA, "model\n", f"<|channel>thought\nHm.<channel|>{GEMMA_CALLS}", ("Hm.", "", [LOOK, WAIT])),
    ("gemma4", GEMMA, "<|channel>thought\n<channel|>", f"So.{GEMMA_CALLS}", ("", "So.", [LOOK, WAIT])),
    ("deepseek_v32", DEEPSEEK_V32, "<think>", f"Hm.</think>{DSML_CALLS}", ("Hm.", "", [LOOK, WAIT])),
    ("nemotron_h", NEMOTRON, "<think>\n", f"Hm.</think>{XML_LOOK}", ("Hm.", "", [LOOK])),
]


@pytest.mark.parametrize(("model_type", "template", "begun", "text", "parsed"), ANSWERS)
def test_answers_are_parsed_by_family(
    model_type: str, template: str, begun: str, text: str, parsed: Spoken
) -> None:
    check_spoken(manner_of(model_type, template, begun=begun), text, parsed)


@pytest.mark.parametrize(
    ("model_type", "tools", "reasoning"),
    [
        ("qwen3", "hermes", "qwen3"),
        ("qwen3_5_moe", "qwen3_coder", "qwen3"),
        ("llama", "llama3_json", None),
        ("gpt_oss", "openai", "openai_gptoss"),
        ("granitemoehybrid", "hermes", None),
        ("deepseek_v3", "deepseek_v3", "deepseek_v3"),
        ("mamba", None, None),
        ("deepseek_v32", "deepseek_v32", "deepseek_v3"),
        ("gemma4_text", "gemma4", "gemma4"),
        ("glm_moe_dsa", "glm47", "glm47"),
        ("kimi_k2", "kimi_k2", None),
        ("minimax_m2", "minimax_m2", "minimax_m2"),
        ("mistral3", "mistral", None),
        ("nemotron_h", "qwen3_coder", "nemotron_v3"),
    ],
)
def test_ambiguous_template_leaves_the_choice_to_the_architecture(
    model_type: str, tools: str | None, reasoning: str | None
) -> None:
    style = style_of(model_type, "{{ messages }} {{ tools }}", (), AUTO)
    assert style.form == (None if tools is None else FORMS[tools].of("", ()))
    assert style.reasoning == (None if reasoning is None else THINKING[reasoning])


def test_each_architecture_is_of_one_family() -> None:
    names = [name for family in FAMILIES for name in family.model_types]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("template", "added", "name"),
    [
        (MISTRAL, (), "[TOOL_CALLS]"),
        (MISTRAL_V3, ("[ARGS]",), "[TOOL_CALLS]"),
        (MISTRAL_V3, (), '{"name": "'),
    ],
)
def test_calls_are_written_as_the_age_of_a_model_wants(
    template: str, added: tuple[str, ...], name: str
) -> None:
    form = style_of("mistral", template, added, AUTO).form
    assert form is not None
    assert form.written.name == name


def test_tokens_identify_a_family_and_settings_take_precedence() -> None:
    assert style_of("", "plain", {"</think>"}, AUTO).reasoning == THINKING["qwen3"]
    parsed = ChatSettings(tool_parser="granite", reasoning_parser="none")
    style = style_of("gpt_oss", GPT_OSS, (), parsed)
    assert (style.form, style.reasoning, style.in_channels) == (FORMS["granite"], None, False)
    silent = style_of("gpt_oss", GPT_OSS, (), ChatSettings(tool_parser="none"))
    assert silent.form is None
    assert silent.in_channels, "reasoning is separated in channels as well"


def test_reasoning_that_goes_without_saying() -> None:
    implied = THINKING["deepseek_r1"]
    assert implied.open_behind("<|Assistant|>")
    assert implied.open_behind("<think>\n")
    assert not implied.open_behind("<think>\n\n</think>\n\n")
    assert not THINKING["deepseek_v3"].open_behind("<|Assistant|>")


def test_channels_go_on_where_the_prompt_ends() -> None:
    manner = manner_of("gpt_oss", GPT_OSS)
    check_spoken(replace(manner, begun=FINAL), "Yes.", ("", "Yes.", []))
    call = "<|channel|>commentary to=functions.wait<|message|>"
    check_spoken(replace(manner, begun=call), '{"s": 3}', ("", "", [WAIT]))
    check_spoken(replace(manner, begun="<|channel|>ana"), "lysis<|message|>Hm.", ("Hm.", "", []))


def test_channels_without_tools_or_without_reasoning_are_words() -> None:
    manner = manner_of("gpt_oss", GPT_OSS)
    text = f"{GPT_OSS_THINKS}{GPT_OSS_CALL}"
    check_spoken(replace(manner, form=None), text, ("Hm.", '{"at": "the harbor"}', []))
    check_spoken(replace(manner, reasoning=None), text, ("", "Hm.", [LOOK]))


def test_further_calls_in_channels_are_dropped_where_one_is_wanted() -> None:
    manner = replace(manner_of("gpt_oss", GPT_OSS), calls_max=1)
    check_spoken(manner, f"{GPT_OSS_CALL}<|call|><|start|>assistant{GPT_OSS_CALL}", ("", "", [LOOK]))
