# pyright: basic
# transformers has no complete types
"""The tokenizer and the chat template of a Hugging Face folder."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from tidemill.kvstore.errors import TidemillError
from tidemill.workers.api.calls import FUNCTION
from tidemill.workers.api.speech import CALL, THOUGHT
from tidemill.workers.api.text import PLAIN, Message, Rendering
from tidemill.workers.messages import RequestError

PENDING_TOKENS_MAX = 8
"""A character has at most 4 bytes: after this many tokens without text, what is pending is no character."""

BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")

Render = Callable[[Sequence[Message], Rendering], str]


class FolderTokenizer:
    """Encodes, decodes and renders chats. `render` is None for a model without a chat template, whose text
    is `template`."""

    def __init__(self, raw: RawTokenizer, render: Render | None, template: str = "") -> None:
        raw.no_truncation()  # long prompts are refused, not cut
        raw.no_padding()
        self._raw = raw
        self._render = render
        self._template = template
        self.tags = frozenset(
            tag for tag in (CALL, THOUGHT, FUNCTION) if tag in template or raw.token_to_id(tag)
        )
        self._added = {token: one.content for token, one in raw.get_added_tokens_decoder().items()}
        self._bytes_of = byte_alphabet() if "ByteLevel" in str(raw.decoder) else None

    def encode(self, text: str) -> list[int]:
        return self._raw.encode(text).ids

    def chat(self, messages: Sequence[Message], how: Rendering = PLAIN) -> list[int]:
        if self._render is None:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        if how.tools and not (CALL in self.tags and "tools" in self._template):
            raise RequestError(
                "this model's chat template has no tools in the manner of Qwen and Hermes: leave them out",
                param="tools",
            )
        try:
            text = self._render(messages, how)
        except RequestError:
            raise
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return self._raw.encode(text, add_special_tokens=False).ids

    def decoder(self) -> "StreamDecoder":
        return StreamDecoder(self._raw)

    def piece(self, token: int) -> bytes:
        text = self._added.get(token)
        if text is not None:
            return text.encode()
        written = self._raw.id_to_token(token) or ""
        if self._bytes_of is not None:
            return b"".join(self._bytes_of.get(char) or char.encode() for char in written)
        fallback = BYTE_FALLBACK.fullmatch(written)
        return bytes.fromhex(fallback[1]) if fallback else written.replace("\u2581", " ").encode()


class StreamDecoder:
    """Text of one stream, in constant memory whatever bytes the model emits."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._stream.step(self._raw, token)
        if text is None and len(self._pending) < PENDING_TOKENS_MAX:
            return ""
        if text is None:
            text = self._raw.decode(self._pending, skip_special_tokens=True)
            self._stream = DecodeStream(skip_special_tokens=True)
        self._pending.clear()
        return text


def byte_alphabet() -> dict[str, bytes]:
    """How byte-level vocabularies write bytes (GPT-2): a printable byte as its Latin-1 character, the others
    as the characters from 256 on, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {chr(byte): bytes([byte]) for byte in printable}
    return written | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


def load_tokenizer(folder: Path) -> FolderTokenizer:
    """Read the tokenizer of a model folder; nothing is downloaded, no code of the folder is run."""
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise TidemillError(
            f"{folder} has no tokenizer that can be read, check tokenizer.json: {reason}"
        ) from error
    raw = getattr(loaded, "backend_tokenizer", None)
    if raw is None:
        raise TidemillError(f"{folder} has no tokenizer.json: convert its tokenizer to the fast format")

    reserved = inspect.signature(loaded.apply_chat_template).parameters

    def render(messages: Sequence[Message], how: Rendering) -> str:
        turns = [{"role": message.role, "content": message.content, **message.more} for message in messages]
        return loaded.apply_chat_template(
            turns,
            tools=list(how.tools) or None,
            tokenize=False,
            add_generation_prompt=how.answers,
            continue_final_message=how.continues,
            **checked_options(how.options, reserved),
        )

    return FolderTokenizer(raw, render if loaded.chat_template else None, str(loaded.chat_template or ""))


def checked_options(options: Mapping[str, Any], reserved: Mapping[str, object]) -> Mapping[str, Any]:
    """Variables for a template: what says how it is read and run is not the client's. Raises RequestError."""
    taken = next((name for name in options if name in reserved or name == "messages"), None)
    if taken is not None:
        raise RequestError(
            f"chat_template_kwargs: {taken} is not a variable of the template: leave it out",
            param="chat_template_kwargs",
        )
    return options
