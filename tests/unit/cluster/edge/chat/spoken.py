"""Answers as models of each family write them, what parsers find in them, and vocabularies for grammars."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tests.support.cluster.fake_service import KEEPER
from tests.support.workers.masks import accepts
from tidemill.cluster.edge.chat.formats import FORMS, NUMBER, QUOTE
from tidemill.cluster.edge.chat.output.harmony import open_parser
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.messages import Grammar

PAD = 0
"""The end of sequence: keeper's own is a tag of other families."""

Spoken = tuple[str, str, Sequence[tuple[str | None, str]]]
"""Reasoning, words, and calls with their arguments as `plain` writes them."""


def plain(arguments: object) -> str:
    return json.dumps(arguments, sort_keys=True)


def parsed(manner: OutputFormat, *pieces: str) -> list[Part]:
    """The parts of an answer. Texts of one kind in a row are one, and pieces of a call."""
    parser, whole = open_parser(manner), list[Part]()
    parts = [part for piece in pieces for part in parser.push(piece, last=False)]
    for part in [*parts, *parser.push("", last=True)]:
        before = whole[-1] if whole else None
        if isinstance(part, Text) and isinstance(before, Text):
            whole[-1] = Text(before.text + part.text)
        elif isinstance(part, ReasoningText) and isinstance(before, ReasoningText):
            whole[-1] = ReasoningText(before.text + part.text)
        elif isinstance(part, Call) and part.name is None:
            assert isinstance(before, Call), "pieces of a call come one after another"
            assert before.index == part.index
            whole[-1] = Call(before.index, before.name, before.arguments + part.arguments)
        else:
            whole.append(part)
    return whole


def spoken(manner: OutputFormat, *pieces: str) -> Spoken:
    parts = parsed(manner, *pieces)
    reasoning, words = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (ReasoningText, Text)
    )
    calls = [(part.name, plain(json.loads(part.arguments))) for part in parts if isinstance(part, Call)]
    return reasoning, words, calls


def check_spoken(manner: OutputFormat, text: str, expected: Spoken) -> None:
    """Check an answer whole, letter by letter, and cut at every fifth place."""
    cuts = [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text), 5))]
    for pieces in cuts:
        assert spoken(manner, *pieces) == expected


def written(form: str, arguments: Mapping[str, Any], name: str = "look") -> str:
    """A call as such a model writes it, without what surrounds all of them."""
    text = json.dumps(arguments)
    marks = FORMS[form].parameters
    match FORMS[form].body:
        case "xml":
            assert marks is not None
            text = "".join(
                marks.before.format(name=key, is_text=json.dumps(isinstance(value, str)))
                + (value if isinstance(value, str) else json.dumps(value))
                + marks.behind
                for key, value in arguments.items()
            )
        case "python":
            text = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        case "gemma":
            text = ",".join(f"{key}:{json.dumps(value)}" for key, value in sorted(arguments.items()))
            text = text.replace('"', QUOTE)
        case "json" | "channels":
            pass
    how = FORMS[form].written
    return f"{how.name}{name}{how.arguments.replace(NUMBER, '0')}{text}{how.end}"


def around(form: str, *calls: str) -> str:
    how = FORMS[form].written
    return f"{how.before}{(how.between or '').join(calls)}{how.behind}"


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer, its added tokens, and grammars over it."""

    raw: RawTokenizer
    grammars: Grammars

    @property
    def added(self) -> dict[str, int]:
        return {token.content: number for number, token in self.raw.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> list[int]:
        return self.raw.encode(text, add_special_tokens=False).ids

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Return whether the grammar does, token by token, and may end then."""
        return accepts(self.grammars.matcher(grammar), [*self.encode(text), PAD])


@cache
def _vocabulary(*tags: str) -> Vocabulary:
    raw = RawTokenizer.from_file(str(KEEPER / "tokenizer.json"))
    cast("Any", raw).add_special_tokens([AddedToken(tag, special=tag[1] == "|") for tag in tags])
    with TemporaryDirectory() as folder:
        raw.save(f"{folder}/tokenizer.json")
        grammars = Grammars(Path(folder), raw.get_vocab_size(), {PAD})
        grammars.matcher(Grammar(kind="json_object"))  # reads the folder, which goes
    return Vocabulary(raw, grammars)


def vocabulary(*tags: str) -> Vocabulary:
    """keeper's, where each of the tags is one token."""
    return _vocabulary(*dict.fromkeys(tags))
