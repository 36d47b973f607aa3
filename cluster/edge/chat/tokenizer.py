"""A tokenizer with its chat template: text to tokens, chats to prompts, tokens back to text."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Encoding, normalizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import DecodeStream

from tidemill.cluster.edge.chat.control_tokens import MARK, ControlTokens, control_texts
from tidemill.cluster.edge.chat.families import SILENT, Style
from tidemill.cluster.edge.chat.formats import FORMS
from tidemill.cluster.edge.chat.templates import Template
from tidemill.cluster.edge.chat.text import PLAIN, MarkedPrompt, Message, Rendering
from tidemill.workers.messages import RequestError
from tidemill.workers.models.model_files import is_panic

PENDING_TOKENS_MAX = 8
"""A character has at most 4 bytes: after this many tokens without text, the pending bytes are no
character."""

SHOWS_TOOLS = re.compile(r"\btools\b")
"""Matches a template that uses tools."""

BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
SLICE_TOKENS = 1 << 14


class FolderTokenizer:
    """Encodes, decodes and renders chats. Several threads may call it concurrently, and other threads run
    while it encodes.

    style            the formats of the model's calls and reasoning
    defaults         the sampling parameters of requests that name none
    added            the texts that are single tokens wherever they stand
    token_chars_max  a length that no token's text exceeds
    """

    def __init__(
        self,
        raw: RawTokenizer,
        template: Template | None,
        style: Style = SILENT,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`template` is None for a model without one."""
        raw.no_truncation()  # long prompts are refused, not cut
        raw.no_padding()
        self._raw = raw
        self._template = template
        self.style = style
        self.defaults = defaults
        added = raw.get_added_tokens_decoder()
        self.added: Mapping[str, int] = {text.content: token for token, text in added.items()}
        self.token_chars_max: int = max(map(len, raw.get_vocab()))
        self._texts = {token: added_token.content for token, added_token in added.items()}
        self._special = {token: special.content for token, special in added.items() if special.special}
        self._bytes_of = byte_alphabet() if "ByteLevel" in str(raw.decoder) else None
        texts = frozenset[str]()
        if template is not None:
            texts = control_texts(self._special.values(), self.added, template.source + template.tried)
        self._control_ids = frozenset(self.added[text] for text in texts)
        self._control = ControlTokens(texts, style.tags & texts - {*self._special.values()})
        _hide_marked(raw, [added[token] for token in sorted(self._control_ids)])

    @property
    def template(self) -> str | None:
        """Return the text of the chat template."""
        return None if self._template is None else self._template.source

    @property
    def takes_tools(self) -> bool:
        """Return whether `chat` takes tools."""
        shows = self._template is None or SHOWS_TOOLS.search(self._template.source) is not None
        return shows and self.style.form is not None

    @property
    def renders_inline(self) -> bool:
        """Return whether `chat` takes no longer for a template than for its text."""
        return self._template is None or self._template.is_inline

    def encode(self, text: str) -> list[int]:
        return self.encode_marked(text, ()).tokens

    def encode_inside(self, text: str) -> list[int]:
        """Return the tokens of a text without those that begin or end every prompt."""
        return self._encoding(text, offsets=False, add_special_tokens=False).ids

    def encode_marked(self, text: str, ends: Collection[int]) -> MarkedPrompt:
        """Return the tokens of a text, with breakpoints at the last tokens that end within its first `ends`
        characters."""
        text = text.replace(MARK, f"{MARK[0]}{MARK}{MARK[1]}")  # it would be dropped
        return _marked(self._encoding(text, offsets=bool(ends), add_special_tokens=True), ends)

    def chat(self, messages: Sequence[Message], how: Rendering = PLAIN) -> MarkedPrompt:
        """Return the tokens of a conversation, with breakpoints where its next requests and other
        conversations are likely to leave it. Raises RequestError."""
        template = self._template
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template FILE",
                param="messages",
            )
        if how.tools and not SHOWS_TOOLS.search(template.source):
            raise RequestError(
                "this model's chat template shows no tools: leave them out, or start the server with another "
                "--chat-template",
                param="tools",
            )
        if how.tools and self.style.form is None:
            known = ", ".join(FORMS)
            raise RequestError(
                "the format of this model's tool calls is unknown: leave tools out, or start the server with "
                f"--tool-call-parser, one of {known}",
                param="tools",
            )
        messages, how = self._control.marked(messages, how)
        text, ends = template.render(messages, how)
        has_marks = MARK in text
        encoding = self._encoding(text, offsets=bool(ends or has_marks), add_special_tokens=False)
        if has_marks:
            self._check_control(text, encoding)
        return _marked(encoding, ends)

    def _encoding(self, text: str, *, offsets: bool, add_special_tokens: bool) -> Encoding:
        """Encode a text as a batch, so that other threads run meanwhile."""
        encode = self._raw.encode_batch if offsets else self._raw.encode_batch_fast
        try:
            (encoding,) = encode([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise RequestError(f"the model's tokenizer cannot take this text: {error}") from error
        return encoding

    def _check_control(self, text: str, encoding: Encoding) -> None:
        """Refuse a control token that the vocabulary itself makes of a client's text. Raises RequestError."""
        ids = encoding.ids
        for token in sorted(self._control_ids.intersection(ids)):
            for index in _places(ids, token):
                start, end = encoding.token_to_chars(index) or (0, 0)
                if MARK in text[start:end]:
                    raise RequestError(
                        f"this model reads {self._texts[token]!r} as a control token wherever it stands: "
                        "leave it out",
                        param="messages",
                    )

    def decoder(self, shown: Collection[str] = ()) -> "StreamDecoder":
        """Return a decoder. Special tokens have no text except those that are `shown`."""
        return StreamDecoder(self._raw, {token for token, text in self._special.items() if text not in shown})

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character; empty for an unknown token."""
        text = self._texts.get(token)
        if text is not None:
            return text.encode()
        written = self._raw.id_to_token(token) or ""
        if self._bytes_of is not None:
            return b"".join(self._bytes_of.get(char) or char.encode() for char in written)
        fallback = BYTE_FALLBACK.fullmatch(written)
        return bytes.fromhex(fallback[1]) if fallback else written.replace("\u2581", " ").encode()


def marked_prompt(
    tokenizer: FolderTokenizer, prompt: str | list[int], breakpoints: Collection[int]
) -> MarkedPrompt:
    """Return a prompt with the breakpoints that its client names: in characters of a text, or in tokens.
    Raises RequestError."""
    if (last := max(breakpoints, default=0)) > len(prompt):
        unit = "tokens" if isinstance(prompt, list) else "characters"
        raise RequestError(
            f"cache_breakpoints: {last} is beyond the end of a prompt of {len(prompt)} {unit}",
            param="cache_breakpoints",
        )
    if isinstance(prompt, list):
        return MarkedPrompt(prompt, tuple(sorted(set(breakpoints))))
    return tokenizer.encode_marked(prompt, breakpoints)


def text_of(tokenizer: FolderTokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens, including special ones. Other threads run between slices of it."""
    pieces = {token: tokenizer.piece(token) for token in set(tokens)}
    slices = (tokens[start : start + SLICE_TOKENS] for start in range(0, len(tokens), SLICE_TOKENS))
    written = [b"".join(map(pieces.__getitem__, part)) for part in slices]
    return b"".join(written).decode(errors="replace")


def _hide_marked(raw: RawTokenizer, control: Sequence[AddedToken]) -> None:
    """Have the tokenizer find control tokens before it normalizes a text, and then drop marks.

    A token that is found in normalized text would be made of other spellings, and of marked text.
    """
    for token in control:
        if token.normalized:
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "special")}
            raw.add_tokens([AddedToken(token.content, normalized=False, **flags)])
    steps = [normalizers.Replace(MARK, ""), *([raw.normalizer] if raw.normalizer is not None else ())]
    raw.normalizer = normalizers.Sequence(steps)


def _places(ids: list[int], token: int) -> Iterator[int]:
    """Yield the indices of a token, by searches that are faster than a loop."""
    index = -1
    with suppress(ValueError):
        while True:
            index = ids.index(token, index + 1)
            yield index


def _marked(encoding: Encoding, ends: Collection[int]) -> MarkedPrompt:
    depths = {_depth_at(encoding, end) for end in ends} - {0}
    return MarkedPrompt(encoding.ids, tuple(sorted(depths)))


def _depth_at(encoding: Encoding, end: int) -> int:
    """Return the number of tokens within the first `end` characters; 0 if no token is there."""
    token = encoding.char_to_token(end)
    if token is not None:
        return token
    token = encoding.char_to_token(end - 1) if end else None
    return 0 if token is None else token + 1


class StreamDecoder:
    """The text of one stream, in constant memory whatever bytes the model emits."""

    def __init__(self, raw: RawTokenizer, hidden: Collection[int]) -> None:
        self._raw = raw
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty inside a character of several tokens and for hidden
        tokens."""
        if token in self._hidden:
            return ""
        self._pending.append(token)
        text = self._stream.step(self._raw, token)
        if text is None and len(self._pending) < PENDING_TOKENS_MAX:
            return ""
        if text is None:
            text = self._raw.decode(self._pending, skip_special_tokens=False)
            self._stream = DecodeStream(skip_special_tokens=False)
        self._pending.clear()
        return text


def byte_alphabet() -> dict[str, bytes]:
    """Return how byte-level vocabularies write bytes (GPT-2): a printable byte as its Latin-1 character, the
    others as the characters from 256 on, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {chr(byte): bytes([byte]) for byte in printable}
    return written | {chr(256 + position): bytes([byte]) for position, byte in enumerate(others)}
