"""Chat templates as families write them: how they take earlier calls and reasoning, and whose they are."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tests.support.cluster.fake_service import KEEPER
from tidemill.cluster.edge.chat.formats import CHANNELS, FINAL, FORMS, THINKING
from tidemill.cluster.edge.chat.request.messages import ChatMessage
from tidemill.cluster.edge.chat.text import Message, Rendering
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer, text_of
from tidemill.cluster.edge.chat.tokenizer_files import load_template, load_tokenizer
from tidemill.cluster.settings import ChatSettings
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "the harbor"}}}
CALLED = (
    Message("user", "Where?"),
    Message("assistant", "", {"tool_calls": [CALL]}),
    Message("tool", "here", {"tool_call_id": "c"}),
)

OBJECTS = """{% for m in messages %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}: {{ c.function.arguments | tojson }}{% endfor %}|
{%- endfor %}"""
TEXTS = OBJECTS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
SHOWN = TEXTS.replace("'' + c.function.arguments", "c.function.arguments")
LOOP = "{% for m in messages %}"
ONE_TEXT = OBJECTS.replace(
    LOOP,
    LOOP
    + """{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception("both") }}{% endif %}
{%- if m.thinking %}({{ m.thinking }}){% endif %}""",
)
CONTINUED = Rendering(answers=False, continues=True)
PROMPT = 'look: {"at": "the harbor"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """keeper's tokenizer, without its template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(KEEPER / name, tmp_path)
    return tmp_path


def rendered(tokenizer: FolderTokenizer, *messages: Message, how: Rendering | None = None) -> str:
    return text_of(tokenizer, tokenizer.chat(messages, how or Rendering()).tokens)


@pytest.mark.parametrize("template", [OBJECTS, TEXTS, SHOWN, ONE_TEXT])
def test_earlier_calls_come_as_the_template_wants_them(folder: Path, template: str) -> None:
    tokenizer = load_tokenizer(folder, ChatSettings(template=template))
    assert rendered(tokenizer, *CALLED) == f"Where?|{PROMPT}|here|"
    assert rendered(tokenizer, Message("assistant", "So.", {"tool_calls": [CALL]})) == f"So.{PROMPT}|"


@pytest.mark.parametrize("template", [OBJECTS, TEXTS, SHOWN, ONE_TEXT])
@pytest.mark.parametrize(
    "arguments", ['{"at": "the har', "look at it", '["a"]', "null", " ", r'{"at": "\ud800"}']
)
def test_worn_calls_are_rendered(folder: Path, template: str, arguments: str) -> None:
    call = {"function": {"name": "look", "arguments": arguments}}
    turn = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    tokenizer = load_tokenizer(folder, ChatSettings(template=template))
    shown = rendered(tokenizer, Message("user", "a"), turn.message())
    if arguments in ("null", " "):
        assert shown == "a|look: {}|"
    elif template in (OBJECTS, ONE_TEXT):
        assert json.loads(shown.removeprefix("a|look: ").removesuffix("|")) == {"arguments": arguments}
    else:
        assert shown == f"a|look: {arguments}|"


def test_ids_of_calls_are_those_of_the_family(folder: Path) -> None:
    again = [
        Message("assistant", "", {"tool_calls": [{**CALL, "id": "d"}, CALL]}),
        Message("tool", "there", {"tool_call_id": "c", "name": "look"}),
        Message("tool", "gone", {"tool_call_id": "e"}),
    ]
    tokenizer = load_tokenizer(folder, ChatSettings(template=BY_ID))
    called = '{"at": "the harbor"}'
    first = f"user: Where?|assistant: <functions.look:0{called}>|tool: here of functions.look:0|"
    assert rendered(tokenizer, *CALLED) == first
    assert rendered(tokenizer, *CALLED, *again) == (
        f"{first}assistant: <functions.look:1{called}><functions.look:2{called}>|"
        "look: there of functions.look:2|tool: gone of e|"
    )
    by_name = BY_ID.replace("c.id", "'functions.' ~ c.function.name ~ ':' ~ loop.index0")
    tokenizer = load_tokenizer(folder, ChatSettings(template=by_name))
    assert rendered(tokenizer, *CALLED) == first
    tokenizer = load_tokenizer(folder, ChatSettings(template=NINE_SHOWN))
    assert rendered(tokenizer, *CALLED) == f"Where?|{PROMPT}|here|"


def test_list_of_no_calls_is_none() -> None:
    turn = ChatMessage.model_validate({"role": "assistant", "content": "a", "tool_calls": []})
    assert turn.message().more == {}  # some templates ask whether there is a list


CHECKED = """{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}
{%- set before = {} if loop.first else messages[loop.index0 - 1] %}
{%- if m.role == 'tool' and not (before.tool_calls or before.role == 'tool') %}
{{- raise_exception('no call') }}{% endif %}
{{- m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}|{% endfor %}"""
ALTERNATING = """{% for m in messages %}
{%- if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('alternate') }}{% endif %}
{{- m.role }}: {{ m.content }}|{% endfor %}"""
NINE = """{% for m in messages %}{% for c in m.tool_calls or [] %}
{%- if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}
{{- m.role }}: {{ m.content }}|{% endfor %}"""
CALLS = "{%- for c in m.tool_calls or [] %}"
NINE_SHOWN = OBJECTS.replace(
    CALLS, CALLS + "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
)
BY_ID = """{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}<{{ c.id }}{{ c.function.arguments | tojson }}>{% endfor %}
{%- if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}|{% endfor %}"""
LATE = Message("system", "s")
ANSWER = Message("assistant", "b")


WRITTEN = '<tool_calls>\n{"name": "look", "arguments": {"at": "the harbor"}}\n</tool_calls>'
RESULT = "<tool>\nhere\n</tool>"
NAMED = Message("user", "a", {"name": "n"})
REASONED = Message("assistant", "c", {"reasoning_content": "r"})


@pytest.mark.parametrize(
    ("template", "messages", "shown"),
    [
        (CHECKED, [LATE, Message("user", "a")], "system: s|user: a|"),
        (CHECKED, [Message("user", "a"), LATE], "user: a|user: <system>\ns\n</system>|"),
        (CHECKED, [Message("user", "a"), CALLED[2]], f"user: a|user: {RESULT}|"),
        (ALTERNATING, [LATE, Message("user", "a")], "user: <system>\ns\n</system>\n\na|"),
        (ALTERNATING, [Message("user", "a"), Message("user", "c")], "user: a\n\nc|"),
        (ALTERNATING, [ANSWER, ANSWER], "user: <assistant>\nb\n</assistant>|assistant: b|"),
        (ALTERNATING, CALLED, f"user: Where?|assistant: {WRITTEN}|user: {RESULT}|"),
        (ALTERNATING, CALLED[1:], f"user: <assistant>\n{WRITTEN}\n</assistant>\n\n{RESULT}|"),
        (NINE, CALLED, f"user: Where?|assistant: {WRITTEN}|tool: here|"),
        (ALTERNATING, [NAMED, ANSWER, REASONED], "user: a|assistant: b\n\nc|"),
    ],
)
def test_refused_messages_are_marked_parts_of_the_user(
    folder: Path, template: str, messages: list[Message], shown: str
) -> None:
    assert rendered(load_tokenizer(folder, ChatSettings(template=template)), *messages) == shown


@pytest.fixture(scope="module")
def checking(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FolderTokenizer]:
    folder = tmp_path_factory.mktemp("checking")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(KEEPER / name, folder)
    return {text: load_tokenizer(folder, ChatSettings(template=text)) for text in (CHECKED, ALTERNATING)}


@settings(deadline=None)
@given(
    st.sampled_from([CHECKED, ALTERNATING]),
    st.lists(st.sampled_from([LATE, ANSWER, *CALLED, Message("user", "c")]), min_size=1, max_size=9),
)
def test_any_conversation_keeps_its_bytes_when_it_grows(
    checking: dict[str, FolderTokenizer], template: str, messages: list[Message]
) -> None:
    whole = rendered(checking[template], *messages)
    for turn in range(1, len(messages)):
        if messages[turn].role == "assistant" and messages[turn - 1].role != "assistant":
            assert whole.startswith(rendered(checking[template], *messages[:turn]))


def test_words_and_reasoning_beside_a_call_are_one_text_where_the_template_takes_one(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, ChatSettings(template=ONE_TEXT))
    more = {"reasoning_content": "Hm."}
    calls = {**more, "tool_calls": [CALL]}
    assert rendered(tokenizer, Message("assistant", "Yes.", more)) == "(Hm.)Yes.|"
    assert rendered(tokenizer, Message("assistant", "", calls)) == f"(Hm.){PROMPT}|"
    assert rendered(tokenizer, Message("assistant", "So.", calls)) == f"(Hm.\nSo.){PROMPT}|"
    both = load_tokenizer(folder, ChatSettings(template=ONE_TEXT.replace('raise_exception("both")', "''")))
    assert rendered(both, Message("assistant", "So.", calls)) == f"(Hm.)So.{PROMPT}|"


def test_template_in_a_file_goes_before_the_models_own(folder: Path) -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        rendered(load_tokenizer(folder), Message("user", "a"))
    (folder / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    assert rendered(load_tokenizer(folder), Message("user", "a")) == "own a"
    (folder / "other").write_text("other {{ messages[0].content }}")
    other = ChatSettings(template=str(folder / "other"))
    tokenizer = load_tokenizer(folder, other)
    assert rendered(tokenizer, Message("user", "a")) == "other a"


@pytest.mark.parametrize("given", ["/nowhere", "/dev/zero", "/"])
def test_template_that_cannot_be_read_is_named(folder: Path, given: str) -> None:
    with pytest.raises(TidemillError, match=f"--chat-template {given} "):
        load_template(folder, ChatSettings(template=given))
    assert load_template(folder) is None


@pytest.mark.parametrize(
    ("template", "fix"),
    [("{{ messages }} <tool_call>", "shows no tools"), ("{{ messages }} {{ tools }}", "--tool-call-parser")],
)
def test_tools_that_a_model_cannot_know_of_are_refused(folder: Path, template: str, fix: str) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("qwen3_next", "unheard_of"))
    tokenizer = load_tokenizer(folder, ChatSettings(template=template))
    with pytest.raises(RequestError, match=fix) as refused:
        rendered(tokenizer, Message("user", "a"), how=Rendering(tools=[{"type": "function"}]))
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("shown", "empty"),
    [
        ("description", '""'),
        ("parameters", '{"type": "object", "properties": {}}'),
        ("parameters.properties", "{}"),
    ],
)
def test_tool_with_a_name_alone_renders_with_every_template(folder: Path, shown: str, empty: str) -> None:
    """A template that takes a field for granted, as that of gpt-oss, has it empty; others do not see it."""
    tool = f"{{{{ t.function.name }}}}|{{{{ t.function.{shown} | tojson }}}}"
    strict = f"{{% for t in tools or [] %}}{tool}{{% endfor %}}"
    how = Rendering(tools=[{"type": "function", "function": {"name": "look"}}], answers=False)
    tokenizer = load_tokenizer(folder, ChatSettings(template=strict, tool_parser="hermes"))
    assert rendered(tokenizer, Message("user", "a"), how=how) == f"look|{empty}"
    loose = load_tokenizer(folder, ChatSettings(template="{{ tools | tojson }}", tool_parser="hermes"))
    assert rendered(loose, Message("user", "a"), how=how) == json.dumps(how.tools)


def test_style_of_a_folder_and_tags_that_are_shown(folder: Path) -> None:
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    cast("Any", raw).add_special_tokens([AddedToken(tag, special=True) for tag in CHANNELS])
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder, ChatSettings(template=f"{FINAL} {{{{ messages }}}}"))
    assert tokenizer.style.form == FORMS["openai"]
    assert tokenizer.style.reasoning == THINKING["openai_gptoss"]
    tokens = tokenizer.encode(f"<|end|>a {FINAL}b \u65e5")
    for shown, text in (((), "a finalb \u65e5"), (CHANNELS, f"<|end|>a {FINAL}b \u65e5")):
        decoder = tokenizer.decoder(shown)
        assert "".join(map(decoder.push, tokens)) == text
    assert {tokenizer.added[tag] for tag in CHANNELS} <= set(range(raw.get_vocab_size()))


KEEPERS = (KEEPER / "chat_template.jinja").read_text()
QWENS = """{% if tools %}<|system|>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{{- tools | tojson }}{% elif messages[0].role == 'system' %}<|system|>{{ messages[0].content }}{% endif %}
{%- set asked = namespace(at=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>
{%- if m.reasoning_content and loop.index0 > asked.at %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""
"""Reasoning is shown until the next question, and the answer begins with it, as in templates of Qwen3."""
STRICT = """{% for m in messages if m.role != 'system' %}
{%- if (m.role == 'assistant') == loop.first or (loop.previtem and loop.previtem.role == m.role) %}
{{- raise_exception('take turns') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
"""System messages are not shown, and others alternate, as in templates of Gemma."""
AGENT = (
    Message("system", "Be kind."),
    Message("user", "Where?"),
    Message("assistant", "", {"tool_calls": [CALL], "reasoning_content": "It is near."}),
    Message("tool", "here", {"tool_call_id": "c"}),
)
TOOL = {"type": "function", "function": {"name": "look"}}
KIND = "<|system|> Be kind.<|end|>\n<|user|>"


@pytest.mark.parametrize(
    ("template", "messages", "how", "ends"),
    [
        (KEEPERS, AGENT[1:2], Rendering(), ["<|user|>", "<|user|> Where?<|end|>\n<|assistant|>"]),
        (KEEPERS, AGENT[:2], Rendering(), [KIND, f"{KIND} Where?<|end|>\n<|assistant|>"]),
        (
            QWENS,
            AGENT,
            Rendering(tools=[TOOL]),
            [
                '<|system|>Be kind.[{"type": "function", "function": {"name": "look"}}]<|user|>',
                "Where?<|assistant|>",
                '</think>[{"name": "look", "arguments": {"at": "the harbor"}}]<|tool|>here<|assistant|>',
            ],
        ),
        (QWENS, AGENT[:2], Rendering(), ["<|system|>Be kind.<|user|>", "Where?<|assistant|>"]),
        (STRICT, AGENT[:2], Rendering(), ["[user]", "Where?[assistant]"]),
        (STRICT, (*AGENT[:2], Message("assistant", "At")), Rendering(answers=False), ["[user]"]),
        (KEEPERS, (Message("user", "a"), Message("assistant", "b")), CONTINUED, ["<|user|>"]),
    ],
)
def test_breakpoints_are_where_later_chats_leave_the_prompt(
    folder: Path, template: str, messages: tuple[Message, ...], how: Rendering, ends: list[str]
) -> None:
    tokenizer = load_tokenizer(folder, ChatSettings(template=template))
    tokens, breakpoints = tokenizer.chat(messages, how)
    prefixes = [text_of(tokenizer, tokens[:depth]) for depth in breakpoints]
    assert len(prefixes) == len(ends)
    assert all(prefix.endswith(end) for prefix, end in zip(prefixes, ends, strict=True)), prefixes


def test_breakpoint_inside_of_a_token_is_at_its_start(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "Emma is in the n\u00e4\u00efve \u65e5\u672c."
    tokens = tokenizer.encode(text)
    for end in range(1, len(text) + 1):
        whole, breakpoints = tokenizer.encode_marked(text, [end])
        depth = breakpoints[0] if breakpoints else 0
        assert whole == tokens
        assert text[:end].startswith(text_of(tokenizer, tokens[:depth]))
        assert depth == len(tokens) or not text[:end].startswith(text_of(tokenizer, tokens[: depth + 1]))
    assert tokenizer.encode_marked(text, range(1, len(text))).breakpoints[0] == 1


def test_bundled_model_shows_tools_and_calls() -> None:
    """A chat without tools is what the model was trained on."""
    tokenizer = load_tokenizer(KEEPER, ChatSettings())
    assert rendered(tokenizer, Message("system", "a"), Message("user", " b ")) == (
        "<|system|> a<|end|>\n<|user|> b<|end|>\n<|assistant|>"
    )
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    shown = rendered(tokenizer, *CALLED, how=Rendering(tools=[tool]))
    assert f"Tools: {json.dumps(tool)} Call one as <tool_call>" in shown
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "the harbor"}}\n</tool_call><|end|>' in shown
    assert tokenizer.style.form is FORMS["hermes"]
