"""Write the metadata of a GGUF file's tokenizer as tokenizer.json, tokenizer_config.json and templates."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.workers.sources.names import SourceError

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _REST = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+", rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_WORD}|\p{{N}}|{_REST}"
QWEN35 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_PUNCTUATION}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
)


@dataclass(frozen=True, slots=True)
class Splits:
    """The split of a text before byte pairs are merged: by patterns, or by that of GPT-2.

    digits           each digit is a part
    nfc              texts are composed first
    ignore_merges    a part that is a token is not merged
    bos              a text begins with the token of a begin, if the file does not name it
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), Splits()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), Splits(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Splits((LLAMA3,), ignore_merges=True, bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splits((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Splits((QWEN2,), nfc=True)),
    "qwen35": Splits((QWEN35,), nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Splits((GPT4O,), ignore_merges=True)),
    "deepseek-v3": Splits(DEEPSEEK3),
}
"""The splits by `tokenizer.ggml.pre`."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens. The last two are no parts of words: special ones, and others."""

SPACE = "\u2581"
"""A space, as sentencepiece writes it."""

ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|return|>", "<|call|>")
"""Special tokens that end an answer, whatever the file names."""

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


class Vocabulary:
    """The tokenizer in the metadata of a file."""

    def __init__(self, path: str, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self.tokens: list[str] = self._found("tokens", [])
        types: list[int] = self._found("token_type", [])
        self._types = types + [1] * (len(self.tokens) - len(types))

    def tokenizer_json(self) -> dict[str, Any]:
        """Return the content of tokenizer.json. Raises SourceError for a kind that is not supported."""
        kind, pre = self._found("model"), self._found("pre", "default")
        if kind == "llama":
            return self._sentencepiece()
        if kind != "gpt2" or pre not in SPLITS:
            raise SourceError(
                f"{self._path} has a tokenizer of the kind {kind} ({pre}), which is not read from GGUF: put "
                "the tokenizer.json of the model beside the file"
            )
        splits = SPLITS[pre]
        return {
            "version": "1.0",
            "added_tokens": self._added({CONTROL, USER_DEFINED}),
            "normalizer": {"type": "NFC"} if splits.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_steps(splits))},
            "post_processor": self._post_processor(begins=splits.bos),
            "decoder": {**BYTE_LEVEL, "use_regex": True},
            "model": {
                "type": "BPE",
                "ignore_merges": splits.ignore_merges,
                "vocab": {text: index for index, text in enumerate(self.tokens)},
                "merges": self._found("merges", []),
            },
        }

    def config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        special = {
            name: self._token(key)
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        }
        return {f"{name}_token": text for name, text in special.items() if text is not None}

    def eos_ids(self) -> list[int]:
        """Return the tokens that end an answer."""
        ids = {self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        named = (i for i, text in enumerate(self.tokens) if text in ENDS and self._types[i] == CONTROL)
        return sorted({*(i for i in ids if type(i) is int), *named})

    def templates(self) -> dict[str, str]:
        """Return the chat templates by the names of their files."""
        prefix = "tokenizer.chat_template"
        found = {
            key.removeprefix(prefix): text for key, text in self._metadata.items() if key.startswith(prefix)
        }
        return {
            f"additional_chat_templates/{name[1:]}.jinja" if name else "chat_template.jinja": text
            for name, text in found.items()
            if isinstance(text, str) and (not name or name[1:].isidentifier())
        }

    def _sentencepiece(self) -> dict[str, Any]:
        """Return the content of tokenizer.json for byte pairs of sentencepiece: characters that are in no
        token are bytes, and a space stands before the text."""
        spaces = self._found("add_space_prefix", default=True)
        prepend, strip = {"type": "Prepend", "prepend": SPACE}, {"type": "Strip", "content": " ", "stop": 0}
        write, read = (
            {"type": "Replace", "pattern": {"String": old}, "content": new}
            for old, new in ((" ", SPACE), (SPACE, " "))
        )
        decoders = [read, {"type": "ByteFallback"}, {"type": "Fuse"}, strip | {"start": int(spaces)}]
        return {
            "version": "1.0",
            "added_tokens": self._added({UNKNOWN, CONTROL, USER_DEFINED}),
            "normalizer": {"type": "Sequence", "normalizers": [prepend, write][not spaces :]},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(begins=True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "unk_token": self._token("unknown"),
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": {text: index for index, text in enumerate(self.tokens)},
                "merges": [pair for _, pair in sorted(self._scored_pairs(), key=lambda scored: scored[0])],
            },
        }

    def _scored_pairs(self) -> Iterator[tuple[float, tuple[str, str]]]:
        """Yield the pairs of words' parts that make another, each with its negative score."""
        rows = zip(self.tokens, self._types, self._found("scores", []), strict=True)
        scores = {text: score for text, kind, score in rows if kind == NORMAL}
        for text, score in scores.items():
            for end in range(1, len(text)):
                if text[:end] in scores and text[end:] in scores:
                    yield -score, (text[:end], text[end:])

    def _added(self, kinds: set[int]) -> list[dict[str, Any]]:
        return [
            {
                "id": index,
                "content": text,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": kind != USER_DEFINED,
            }
            for index, (text, kind) in enumerate(zip(self.tokens, self._types, strict=True))
            if kind in kinds
        ]

    def _post_processor(self, *, begins: bool) -> dict[str, Any] | None:
        bos = self._token("bos")
        if bos is None or not self._found("add_bos_token", begins):
            return None
        begin, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        ids = [self._metadata["tokenizer.ggml.bos_token_id"]]
        return {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
        }

    def _token(self, name: str) -> str | None:
        index = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[index] if type(index) is int and 0 <= index < len(self.tokens) else None

    def _found(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - metadata
        return self._metadata.get(f"tokenizer.ggml.{name}", default)


def _steps(splits: Splits) -> Iterable[dict[str, Any]]:
    if splits.digits:
        yield {"type": "Digits", "individual_digits": True}
    for pattern in splits.patterns:
        yield {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    yield {**BYTE_LEVEL, "use_regex": not splits.patterns}
