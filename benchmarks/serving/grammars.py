"""Measure the CPU time of grammars: compiling, and each mask of a known answer; beside xgrammar if
installed.

python -m benchmarks.serving.grammars                                keeper's tokenizer, 852 entries
python -m benchmarks.serving.grammars --train DIR --entries 151936
    a byte-level BPE trained on the text below DIR
python -m benchmarks.serving.grammars --model DIR                    the tokenizer.json in it
"""

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.messages import Grammar
from tidemill.workers.sources.names import bundled

END = "<|end|>"
TRAINING_BYTES = 110_000_000
FILE_BYTES = 400_000
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LARK = """
start: product (("+"|"-") product)*
product: atom (("*"|"/") atom)*
atom: NUM | NAME | NAME "(" start ("," start)* ")" | "(" start ")"
NUM: /[0-9]+(\\.[0-9]+)?/
NAME: /[a-z][a-z0-9]*/
"""
EBNF = """
root ::= product (("+"|"-") product)*
product ::= atom (("*"|"/") atom)*
atom ::= num | name | name "(" root ("," root)* ")" | "(" root ")"
num ::= [0-9]+ ("." [0-9]+)?
name ::= [a-z] [a-z0-9]*
"""
TEXT = (
    "The quick brown fox jumps over the lazy dog, then writes a long report about it, with figures and notes."
)


class Follower(Protocol):
    def mask(self) -> object: ...
    def push(self, token: int) -> None: ...
    def rewind(self, num_tokens: int) -> None: ...


@dataclass(frozen=True)
class Case:
    name: str
    grammar: Grammar
    answer: str


def closed(**properties: object) -> dict[str, object]:
    """The schema of an object with just these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def cases() -> Iterator[Case]:
    text, integer = {"type": "string"}, {"type": "integer"}
    codes = [f"option_{n * 7919 % 1000:03d}_{'abcdefgh'[n % 8] * 3}" for n in range(300)]
    address = closed(street=text, city=text, zip=text)
    item = closed(sku=text, count=integer, price={"type": "number"})
    node = closed(value=text, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
    date = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
    phone = {"type": "string", "pattern": "^\\+[1-9][0-9]{7,14}$"}
    tag = {"type": "string", "minLength": 1, "maxLength": 30}
    leaf = {"value": "leaf", "children": []}
    schemas: dict[str, tuple[object, object]] = {
        "flat object": (
            closed(name=text, age=integer, role={"enum": ["admin", "user"]}, active={"type": "boolean"}),
            {"name": "Ada Lovelace", "age": 36, "role": "admin", "active": True},
        ),
        "nested objects": (
            closed(id=integer, to=closed(name=text, address=address), items={"type": "array", "items": item}),
            {
                "id": 17,
                "to": {
                    "name": "C. Babbage",
                    "address": {"street": "1 Dorset St", "city": "London", "zip": "W1"},
                },
                "items": [
                    {"sku": "AB-1", "count": 3, "price": 9.75},
                    {"sku": "CD-2", "count": 1, "price": 120},
                ],
            },
        ),
        "enum of 300": (closed(code={"enum": codes}), {"code": codes[123]}),
        "patterns": (
            closed(date=date, id={"type": "string", "format": "uuid"}, phone=phone),
            {"date": "2024-05-17", "id": "123e4567-e89b-12d3-a456-426614174000", "phone": "+4915112345678"},
        ),
        "recursive": (
            {"$defs": {"node": node}, "$ref": "#/$defs/node"},
            {"value": "root", "children": [{"value": "left", "children": [leaf]}, leaf]},
        ),
        "60 optional": (
            {"type": "object", "properties": {f"field_{n}": {"anyOf": [text, integer]} for n in range(60)}},
            {"field_1": "x", "field_40": 7, "field_59": "y"},
        ),
        "bounded strings": (
            closed(
                title={"type": "string", "maxLength": 200},
                tags={"type": "array", "items": tag, "maxItems": 9},
            ),
            {"title": TEXT, "tags": ["one", "two words", "three"]},
        ),
    }
    for name, (schema, answer) in schemas.items():
        yield Case(name, Grammar(kind="json_schema", text=json.dumps(schema)), json.dumps(answer))
    url = r"(https?://)?([a-z0-9-]{1,20}\.){1,3}[a-z]{2,6}(/[A-Za-z0-9_.-]{0,30}){0,5}"
    yield Case("url (regex)", Grammar(kind="regex", text=url), "https://www.example.org/path/some_file.html")
    yield Case("sums (grammar)", Grammar(kind="lark", text=LARK), "1+(23*45-6)/(7.5+foo(8,bar(9)))*x1")


def xgrammars(tokenizer: Tokenizer, end: int) -> Callable[[Grammar], Follower]:
    """The same through xgrammar, without its cache of compiled grammars."""
    import xgrammar  # noqa: PLC0415 - not a dependency

    width = tokenizer.get_vocab_size()
    entries = [tokenizer.id_to_token(token) or "" for token in range(width)]
    info = xgrammar.TokenizerInfo(
        entries, xgrammar.VocabType.BYTE_LEVEL, vocab_size=width, stop_token_ids=[end]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class Follows:
        def __init__(self, grammar: Grammar) -> None:
            match grammar.kind:
                case "json_schema":
                    compiled = compiler.compile_json_schema(grammar.text, max_whitespace_cnt=40)
                case "regex":
                    compiled = compiler.compile_regex(grammar.text)
                case _:
                    compiled = compiler.compile_grammar(EBNF)
            self._inner = xgrammar.GrammarMatcher(compiled)
            self._bits = xgrammar.allocate_token_bitmask(1, width)

        def mask(self) -> object:
            self._inner.fill_next_token_bitmask(self._bits)
            return np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")

        def push(self, token: int) -> None:
            assert self._inner.accept_token(token)

        def rewind(self, num_tokens: int) -> None:
            self._inner.rollback(num_tokens)

    return Follows


def measure(follow: Callable[[Grammar], Follower], grammar: Grammar, tokens: Sequence[int]) -> list[float]:
    """[compile ms, mean mask us, longest mask us, compile and all masks ms, rewind of it all us]"""
    start = time.process_time()
    follower = follow(grammar)
    compile_s, mask_s = time.process_time() - start, list[float]()
    for token in tokens:
        start = time.process_time()
        follower.mask()
        mask_s.append(time.process_time() - start)
        follower.push(token)
    start = time.process_time()
    follower.rewind(len(tokens))
    rewind_s = time.process_time() - start
    whole_s = compile_s + sum(mask_s)
    return [1e3 * compile_s, 1e6 * statistics.mean(mask_s), 1e6 * max(mask_s), 1e3 * whole_s, 1e6 * rewind_s]


def train(folder: Path, entries: int) -> Tokenizer:
    """A byte-level BPE of the text files below `folder`, as large models have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=entries - 1, min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts(folder), trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


def texts(folder: Path) -> Iterator[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    Random(1).shuffle(files)
    left = TRAINING_BYTES
    for path in files:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(FILE_BYTES)
        if b"\0" not in content:
            left -= len(content)
            yield content.decode(errors="ignore")
        if left < 0:
            return


def report(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    grammars = Grammars(folder, tokenizer.get_vocab_size(), (end,))
    libraries: dict[str, Callable[[Grammar], Follower]] = {"llguidance": grammars.matcher}
    if find_spec("xgrammar") is not None:
        libraries["xgrammar"] = xgrammars(tokenizer, end)
    start = time.process_time()
    grammars.matcher(Grammar(kind="json_object"))
    print(f"{tokenizer.get_vocab_size():,} entries, read in {1e3 * (time.process_time() - start):.0f} ms")
    print("| grammar | tokens | library | compile, ms | mask, us | longest | whole answer, ms | rewind, us |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases():
        tokens = tokenizer.encode(case.answer, add_special_tokens=False).ids
        for name, follow in libraries.items():
            figures = measure(follow, case.grammar, tokens)
            print(f"| {case.name} | {len(tokens)} | {name} |", *(f"{figure:,.1f} |" for figure in figures))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.grammars")
    parser.add_argument("--model", type=Path, default=bundled()["keeper"])
    parser.add_argument("--train", type=Path)
    parser.add_argument("--entries", type=int, default=151_936)
    options = parser.parse_args()
    if options.train is None:
        report(options.model)
        return
    with TemporaryDirectory() as folder:
        train(options.train, options.entries).save(f"{folder}/tokenizer.json")
        report(Path(folder))


if __name__ == "__main__":
    main()
