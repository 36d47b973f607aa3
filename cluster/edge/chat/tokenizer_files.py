"""Reads the tokenizer and the chat templates of a Hugging Face folder, without transformers."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tidemill.cluster.edge.chat.families import style_of
from tidemill.cluster.edge.chat.template_process import template_of_folder
from tidemill.cluster.edge.chat.templates import Template, template_of
from tidemill.cluster.edge.chat.tokenizer import FolderTokenizer
from tidemill.cluster.settings import AUTO, ChatSettings
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.models.model_files import read_json, read_text, reading

SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The special tokens, as tokenizer_config.json names them and templates see them."""

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)

SAMPLED = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""The fields of generation_config.json that are defaults of requests, as in vLLM, and their ranges."""

ADDED_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


ADDED_MAX = 1 << 16
"""The most tokens beside the vocabulary: the library takes seconds for more."""

GROWTH_MAX = 4096
"""The factor by which a normalizer or a decoder may make a text longer."""


def load_tokenizer(
    folder: Path, chat: ChatSettings = AUTO, template: Template | None = None
) -> FolderTokenizer:
    """Read the tokenizer of a model folder; nothing is downloaded, and no code of the folder runs. `template`
    is what `load_template` returned, if it has been called. Raises TidemillError."""
    raw = _read_raw(folder / "tokenizer.json")
    config, special = _config_of(folder)
    with reading(folder / "tokenizer_config.json"):
        _add_tokens(raw, config, special)
    template = template or load_template(folder, chat)
    added = {token.content for token in raw.get_added_tokens_decoder().values()}
    style = style_of(model_type_of(folder), template.source if template else "", added, chat)
    with reading(folder / "tokenizer.json"):
        return FolderTokenizer(raw, template, style, _defaults(folder, chat))


def _defaults(folder: Path, chat: ChatSettings) -> dict[str, Any]:
    """Return the sampling parameters of requests that name none. Raises ModelError."""
    path = folder / "generation_config.json"
    found = _read_optional(path) if chat.generation_config == "auto" else {}
    given = {name: found[name] for name in SAMPLED if found.get(name) is not None}
    with reading(path):
        for name, value in given.items():
            least, most = SAMPLED[name]
            if not least <= value <= most:
                raise ValueError(f"{name} {value} lies not in {least:g} to {most:g}")
    return given


def load_template(folder: Path, chat: ChatSettings = AUTO) -> Template | None:
    """Read the chat template of a model folder and try it; None if there is none. Raises TidemillError."""
    config, special = _config_of(folder)
    with reading(folder / "tokenizer_config.json"):
        texts = _templates_of(folder, config, chat)
        return template_of_folder(texts, special) if "".join(texts.values()) else None


def _config_of(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tokenizer_config.json, and the special tokens by their names in it."""
    config = _read_optional(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older releases of transformers saved special tokens so
        config |= _read_optional(folder / "special_tokens_map.json")
    return config, {name: text for name in SPECIAL_TOKENS if (text := _content(config.get(name))) is not None}


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the files of a model folder that `load_tokenizer` reads, by their names in it."""
    paths = [folder / name for name in FILES]
    paths += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def _read_raw(path: Path) -> RawTokenizer:
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise TidemillError(
            f"{path.parent} has no tokenizer.json: transformers writes one, with "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error
    with reading(path):
        parts = json.loads(text)
        _check_count(len(parts.get("added_tokens") or ()))
        for part in ("normalizer", "decoder"):
            if (growth := _growth(parts.get(part))) > GROWTH_MAX:
                raise ValueError(f"{part} makes texts {growth} times longer, {GROWTH_MAX} is the most")
        return RawTokenizer.from_str(text)


def _growth(part: object) -> int:
    """Return how many times longer the steps of a normalizer or a decoder can make a text."""
    if isinstance(part, list):
        return prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    texts = (part.get(name) for name in ("content", "prepend"))
    own = prod(1 + len(text) for text in texts if isinstance(text, str))
    return own * prod(map(_growth, part.values()))


def _read_optional(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without the file. Raises ModelError."""
    return read_json(path) if path.exists() else {}


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
    added: list[AddedToken] = []
    for token in (*listed, *named):
        text = _content(token)
        if text is None or text in known:
            continue
        known.add(text)
        flags = (
            {name: token[name] for name in ADDED_FLAGS if name in token} if isinstance(token, dict) else {}
        )
        added.append(AddedToken(text, **{"special": True, **flags}))
    _check_count(len(added))
    raw.add_tokens(added)


def _check_count(count: int) -> None:
    if count > ADDED_MAX:
        raise ValueError(f"{count} added tokens, {ADDED_MAX} are the most")


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
        found = {str(named["name"]): str(named["template"]) for named in given}
    if not found and given:
        found = {"default": given}
    if found and "default" not in found:
        raise TidemillError(f"{folder} names no default among its chat templates: pass --chat-template FILE")
    return found


def model_type_of(folder: Path) -> str:
    """Return the model type; empty if config.json has none."""
    try:
        return str(read_json(folder / "config.json").get("model_type", ""))
    except TidemillError:
        return ""
