"""Keeps what clients write in a chat from becoming control tokens, which only the chat template writes.

message --mark--> `<[mark]|im_start|>` --template--> prompt --tokenizer--> `<`, `|`, `im`, `_start`, ...

A mark inside of a control token hides it from the tokenizer's search for added tokens. The normalizer then
drops the mark, so the text has the tokens of ordinary text. Text without control tokens gets no mark.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, cast

from tidemill.cluster.edge.chat.text import Message, Rendering
from tidemill.workers.messages import RequestError

MARK = "\ufdd0\ufdd1"
"""Two noncharacters of Unicode. Where a client writes them they are kept, split by a mark."""

SLICE_CHARS = 1 << 16
"""A search holds the interpreter for this many characters at most."""

TAGGED_ROLES = frozenset(["system", "assistant"])
"""The roles whose words and reasoning may hold the tags of calls and reasoning: templates look for them."""

CORE = re.compile(r"\w(?:.*\w)?", re.DOTALL)


def control_texts(special: Iterable[str], added: Iterable[str], shown: str) -> frozenset[str]:
    """Return the added tokens that control a chat: special ones, and others that its template shows.

    `shown` is what a template writes. White space is not control: some vocabularies have runs of it.
    """
    texts = {*special, *(text for text in added if text in shown)}
    return frozenset(text for text in texts if len(text) > 1 and text.strip(" \t\r\n\u2581"))


class ControlTokens:
    """The control tokens of a model. `tags` are those that earlier answers may hold as tokens."""

    def __init__(self, texts: Collection[str], tags: Collection[str] = ()) -> None:
        self._anyones = _Marker(frozenset(texts))
        self._models = _Marker(frozenset(texts) - frozenset(tags)) if tags else self._anyones

    def marked(self, messages: Sequence[Message], how: Rendering) -> tuple[Sequence[Message], Rendering]:
        """Mark whatever a client wrote. Raises RequestError."""
        try:
            mark = self._anyones.marked
            return [self._message(message) for message in messages], replace(
                how, tools=mark(how.tools), options=mark(how.options)
            )
        except RecursionError:
            raise RequestError("a tool or a call has too many levels: send fewer", param="messages") from None

    def _message(self, message: Message) -> Message:
        words = (self._models if message.role in TAGGED_ROLES else self._anyones).marked
        more = self._anyones.marked(message.more)
        reasoning = message.more.get("reasoning_content")
        if reasoning is not None:
            more = {**more, "reasoning_content": words(reasoning)}
        return Message(message.role, words(message.content), more)


class _Marker:
    """Marks texts where they hold one of `texts`, or could be a part of one beside what a template writes."""

    def __init__(self, texts: Collection[str]) -> None:
        self._longest = max(map(len, texts), default=0)
        self._heads = tuple({text[:2] for text in (*texts, MARK)})
        self._whole = re.compile(f"(?={_any_of((*texts, MARK))})")
        # `<` `|im_start|` `>`: a template that puts names between brackets would make a token of a name
        cores = [(text, found.start(), found.end()) for text in texts if (found := CORE.search(text))]
        self._inner = {
            text[start:end]
            for text, first, last in cores
            for start in range(first + 1)
            for end in range(last, len(text) + 1)
        }
        self._ends = re.compile(_any_of(text[:size][::-1] for text in texts for size in range(1, len(text))))
        self._begins = re.compile(
            _any_of(text[at:] for text, first, _ in cores for at in range(1, first + 1))
        )

    def marked(self, value: Any) -> Any:  # noqa: ANN401 - any JSON
        """Return a value with marked texts; itself, not a copy, if nothing in it needs a mark."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            entries = cast("Mapping[str, Any]", value)
            texts = {self._text(key): self.marked(entry) for key, entry in entries.items()}
            same = all(key in texts and texts[key] is entry for key, entry in entries.items())
            return entries if same else texts
        if isinstance(value, (list, tuple)):
            items = cast("Sequence[Any]", value)
            marked = [self.marked(item) for item in items]
            return items if all(map(is_, marked, items)) else marked
        return value

    def _text(self, text: str) -> str:
        if not text or not self._longest:
            return text
        before = MARK if self._begins.match(text) else ""
        behind = MARK if text in self._inner or self._ends.match(text[-self._longest :][::-1]) else ""
        if any(head in text for head in self._heads):
            text = "".join(self._split(text))
        return f"{before}{text}{behind}" if before or behind else text

    def _split(self, text: str) -> Iterable[str]:
        done = 0
        for start in range(0, len(text), SLICE_CHARS):
            end = start + SLICE_CHARS
            for found in self._whole.finditer(text, start, end + self._longest):
                at = found.start() + 1
                if done < at <= end:
                    yield f"{text[done:at]}{MARK}"
                    done = at
        yield text[done:]


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches where one of the texts begins, in the form of a tree: a list would be
    tried entry by entry. Without texts it matches nowhere."""
    by_first = defaultdict[str, set[str]](set)
    for text in texts:
        by_first[text[:1]].add(text[1:])
    if "" in by_first:
        return ""
    branches = [re.escape(first) + _any_of(rests) for first, rests in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else "(?!)"
