# pyright: basic
# tokenizers has no complete types
"""Reads the tokenizer and the chat templates of a Hugging Face folder, without transformers."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tidemill.cluster.edge.chat.families import style_of
from tidemill.cluster.edge.chat.jinja_template import RESERVED, JinjaTemplate
from tidemill.cluster.edge.chat.templates import (
    Turns,
    careful,
    shape_of,
    template_of,
)
from tidemill.cluster.edge.chat.text import Rendering
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer, Template
from tidemill.cluster.settings import AUTO, ChatSettings
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError

SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The special tokens, as tokenizer_config.json names them and templates see them."""

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
)

ADDED_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def load_tokenizer(folder: Path, chat: ChatSettings = AUTO) -> FolderTokenizer:
    """Read the tokenizer of a model folder; nothing is downloaded, and no code of the folder runs. Raises
    TidemillError."""
    raw = _read_raw(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older releases of transformers saved special tokens so
        config |= _read_json(folder / "special_tokens_map.json")
    special = {name: text for name in SPECIAL_TOKENS if (text := _content(config.get(name))) is not None}
    _add_tokens(raw, config, special)
    texts = _templates_of(folder, config, chat)
    shown = "".join(texts.values())
    added = {token.content for token in raw.get_added_tokens_decoder().values()}
    style = style_of(model_type_of(folder), shown, added, chat)
    if not shown:
        return FolderTokenizer(raw, None, style)

    @cache
    def compiled(name: str) -> JinjaTemplate:
        return JinjaTemplate(texts.get(name, texts["default"]), special)

    @careful
    def render(turns: Turns, how: Rendering) -> str:
        return compiled("tool_use" if how.tools else "default").render(
            turns,
            how.tools,
            checked_options(how.options),
            add_generation_prompt=how.answers,
            continue_final_message=how.continues,
        )

    return FolderTokenizer(raw, Template(shown, render, shape_of(render)), style)


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files of a model folder that `load_tokenizer` reads, by their names in it."""
    paths = [folder / name for name in FILES]
    paths += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def _read_raw(path: Path) -> RawTokenizer:
    try:
        return RawTokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TidemillError(
            f"{path.parent} has no tokenizer.json: transformers writes one, with "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error
    except Exception as error:  # the library raises Exception itself
        raise TidemillError(
            f"{path} cannot be read as a tokenizer: {' '.join(str(error).split())}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty without the file. Raises TidemillError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TidemillError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise TidemillError(f"{path} is not a JSON object")
    return found


def _content(token: object) -> str | None:
    """Return a special token's text, which is stored as itself or in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add_tokens(raw: RawTokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add what tokenizer_config.json names and tokenizer.json lacks, in the order of their ids."""
    decoder = config.get("added_tokens_decoder") or {}
    listed = [decoder[index] for index in sorted(decoder, key=int)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [*special.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    known = set(raw.get_vocab())
    for token in (*listed, *named):
        text = _content(token)
        if text is None or text in known:
            continue
        known.add(text)
        flags = (
            {name: token[name] for name in ADDED_FLAGS if name in token} if isinstance(token, dict) else {}
        )
        raw.add_tokens([AddedToken(text, **{"special": True, **flags})])


def _templates_of(folder: Path, config: Mapping[str, Any], chat: ChatSettings) -> dict[str, str]:
    """Return the chat templates by name, empty without any: the operator's, else those in separate files,
    else those of tokenizer_config.json. Raises TidemillError."""
    if chat.template is not None:
        return {"default": template_of(chat.template)}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: template_of(str(path)) for name, path in files.items() if path.exists()}
    given = config.get("chat_template") or ""
    if not found and not isinstance(given, str):
        found = {named["name"]: named["template"] for named in given}
    if not found and given:
        found = {"default": given}
    if found and "default" not in found:
        raise TidemillError(f"{folder} names no default among its chat templates: pass --chat-template FILE")
    return found


def model_type_of(folder: Path) -> str:
    """Return the model type; empty if config.json has none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""


def checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the template variables of a client. Those that determine how a template runs are refused. Raises
    RequestError."""
    taken = next((name for name in options if name in RESERVED), None)
    if taken is not None:
        raise RequestError(
            f"chat_template_kwargs: {taken} is not a variable of the template: leave it out",
            param="chat_template_kwargs",
        )
    return options
