"""Tokenizers and chat templates read from a folder give what transformers gives for the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tests.support.cluster.fake_service import KEEPER, FakeService, app_over, call, saying
from tidemill.cluster.edge.chat.text import Message, Rendering
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.settings import ChatSettings
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "the <harbor> ä"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "é": [1, None]}}}
CHAT = (
    Message("system", "Be kind."),
    Message("user", "Where? "),
    Message("assistant", "", {"tool_calls": [CALL], "reasoning_content": "It is near."}),
    Message("tool", "here", {"tool_call_id": "c", "name": "look"}),
)
EVERYTHING = """{{- bos_token }}
{%- set ns = namespace(first=true) %}
{%- if tools is not none %}
{{- tools | tojson }}{{ tools | tojson(indent=2) }}
{%- endif %}
    {% for m in messages %}
{%- if m.role == 'system' %}{% continue %}{% endif %}
{% generation %}<{{ m.role }}>{{ m.content }}{% endgeneration %}
{%- if m.thinking is defined %}({{ m.thinking }}|{{ m.reasoning_content }}){% endif %}
{%- for call in m.tool_calls or [] %}{{ call | tojson }}{{ call.function.name }}{% endfor %}
{%- if ns.first %}{% set ns.first = false %}first{% endif %}
{%- if loop.index > 9 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{{ style | default("plain") }}{% endif %}
{{- unk_token is defined }}"""
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"


TEXTS = ("Emma is in the tower.", "", "<s>Emma</s>", "a <later>b<extra> c<pad>d", "naïve 日本 \n\n x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with keeper's vocabulary, whose tokenizer_config.json a test writes."""
    raw = RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    write(tmp_path)
    return tmp_path


def write(folder: Path, **config: object) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def theirs(folder: Path) -> Any:  # noqa: ANN401
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": False},
        {"added_tokens_decoder": {"9000": {"content": "<later>", "special": False}}},
        {"extra_special_tokens": ["<extra>"], "pad_token": {"__type": "AddedToken", "content": "<pad>"}},
        {"unk_token": None, "model_max_length": 4},
    ],
    ids=json.dumps,
)
def test_texts_have_the_tokens_that_transformers_gives_them(folder: Path, config: dict[str, object]) -> None:
    write(folder, **config)
    ours, reference = load_tokenizer(folder), theirs(folder)
    for text in TEXTS:
        assert ours.encode(text) == reference(text)["input_ids"], text
        assert ours.encode(text) == reference.encode(text)


@pytest.mark.parametrize("template", [EVERYTHING, TRIMMING], ids=["everything", "trimming"])
@pytest.mark.parametrize("num_messages", [2, 3, 4])
def test_chats_are_rendered_as_transformers_renders_them(
    folder: Path, template: str, num_messages: int
) -> None:
    write(folder, chat_template=template)
    ours, reference = load_tokenizer(folder), theirs(folder)
    chat = CHAT[:num_messages]
    turns: list[object] = [
        {"role": message.role, "content": message.content, **message.more} for message in chat
    ]
    for tools in ([], [TOOL]):
        how = Rendering(tools=tools, options={"style": "brief"})
        if tools and "tools" not in template:
            continue
        assert ours.chat(chat, how).tokens == reference.apply_chat_template(
            turns, tools=list(tools) or None, add_generation_prompt=True, return_dict=False, style="brief"
        )
    continued = Rendering(answers=False, continues=True)
    if chat[-1].content:
        assert ours.chat(chat, continued).tokens == reference.apply_chat_template(
            turns, continue_final_message=True, return_dict=False
        )


def test_special_tokens_of_an_older_folder_are_seen_by_its_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}{{ pad_token }}"})
    )
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "pad_token": "a"})
    )
    decode = RawTokenizer.from_file(str(folder / "tokenizer.json")).decode
    assert decode(load_tokenizer(folder).chat(CHAT).tokens, skip_special_tokens=False) == "<s>a"


def test_templates_come_from_files_first_and_by_name(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    write(folder, chat_template=named)
    tokenizer = load_tokenizer(folder, ChatSettings(tool_parser="hermes"))
    text = RawTokenizer.from_file(str(folder / "tokenizer.json")).decode
    assert text(tokenizer.chat(CHAT).tokens) == "plain"
    assert text(tokenizer.chat(CHAT, Rendering(tools=[TOOL])).tokens) == "with tools"
    (folder / "chat_template.jinja").write_text("from a file")
    assert text(load_tokenizer(folder).chat(CHAT).tokens) == "from a file"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "refuses these messages"),
        ("{{ messages", "refuses these messages"),
        ("{{ tried | unknown }}", "refuses these messages"),
    ],
)
def test_template_that_refuses_or_reaches_out_is_an_error_of_the_request(
    folder: Path, template: str, message: str
) -> None:
    write(folder, chat_template=template)
    with pytest.raises(RequestError, match=message):
        load_tokenizer(folder).chat(CHAT)


def test_message_that_the_template_does_not_show_cannot_be_continued(folder: Path) -> None:
    write(folder, chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match="cannot be continued"):
        load_tokenizer(folder).chat(CHAT, Rendering(answers=False, continues=True))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "JSONDecodeError"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
    ],
)
def test_error_in_a_file_names_the_file(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(TidemillError, match=f"{name}.*{message}"):
        load_tokenizer(folder)


def test_error_without_tokenizer_json_names_the_fix(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TidemillError, match="save_pretrained"):
        load_tokenizer(folder)


def replaced(pattern: str, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [replaced("a", "aa")] * 30}, "times longer"),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 9999}, "times longer"),
        ("decoder", {"type": "Sequence", "decoders": [replaced("", "a" * 99)] * 2}, "times longer"),
        ("added_tokens", [{"id": 0, "content": "a"}] * ((1 << 16) + 1), "65537 added tokens"),
        ("normalizer", replaced("(a", ""), "Oniguruma"),
        ("model", 7, "untagged enum"),
    ],
)
def test_tokenizer_that_multiplies_texts_or_is_none_is_refused(
    folder: Path, part: str, value: object, message: str
) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    with pytest.raises(TidemillError, match=f"tokenizer.json cannot be used .*{message}.*: download"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"first": {"content": "<a>"}}},
        {"added_tokens_decoder": [1, 2]},
        {"added_tokens_decoder": {str(index): {"content": f"<{index}>"} for index in range((1 << 16) + 1)}},
        {"bos_token": "\ud800"},
        {"pad_token": {"content": "<" * 99_999}, "chat_template": "{{ pad_token }}"},
        {"chat_template": 7, "extra_special_tokens": 7},
        {"chat_template": [{"name": "default"}]},
    ],
)
def test_settings_that_no_tokenizer_has_are_refused_in_one_line(
    folder: Path, config: dict[str, object]
) -> None:
    write(folder, **config)
    with pytest.raises(TidemillError, match=r"^\S*tokenizer\S* cannot be used [^\n]*: download") as refused:
        load_tokenizer(folder)
    str(refused.value).encode()


def test_word_that_the_vocabulary_has_no_token_for_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": words}))
    with pytest.raises(RequestError, match="cannot take this text: WordLevel"):
        load_tokenizer(folder).encode("b")


def test_pattern_that_the_library_gives_up_on_refuses_the_text(folder: Path) -> None:
    path = folder / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a|a)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": split}))
    tokenizer = load_tokenizer(folder)
    with pytest.raises(RequestError, match="retry-limit"):
        tokenizer.encode("a" * 60 + "b")
    assert tokenizer.encode("b")


def test_sampling_defaults_are_those_of_the_generation_config(tmp_path: Path) -> None:
    for file in KEEPER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert load_tokenizer(tmp_path).defaults == {}
    path = tmp_path / "generation_config.json"
    path.unlink()
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": null, "max_length": 9}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.defaults == {"temperature": 0.6, "top_k": 20}
    service = FakeService(saying(" a"))
    app = app_over(service, tokens=tokenizer)
    for path_of_api, body in (("completions", {"prompt": "a"}), ("responses", {"input": "a"})):
        found = call(app, "POST", f"/v1/{path_of_api}", json=body).json()
        assert found.get("temperature", 0.6) == 0.6, "a response has what was used"
        call(app, "POST", f"/v1/{path_of_api}", json=body | {"temperature": 0})
    drawn = [(request.sampling.temperature, request.sampling.top_k) for request in service.requests]
    assert drawn == [(0.6, 20), (0.0, 20)] * 2
    assert load_tokenizer(tmp_path, ChatSettings(generation_config="vllm")).defaults == {}
    path.write_text('{"temperature": "hot"}')
    with pytest.raises(TidemillError, match=r"generation_config\.json cannot be used"):
        load_tokenizer(tmp_path)
