"""Grammars and sampling hold on every path: the same tokens with steps in flight, with guesses, after
preemption, and when another worker continues."""

import asyncio
import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from tests.support.parity.served import serving, together
from tests.support.workers.settings import plain_settings
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.kvstore.layout import layout_of
from tidemill.workers.engine import memory_plan
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.execution import grammar, model_runner, sampler
from tidemill.workers.execution.step import Drawn, Row
from tidemill.workers.messages import Grammar, Request, Sampling
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled

P = 16
NEW_TOKENS = 40
EXTENTS = 200
SHAKE_S = 0.03
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FRAME = 'start: thought @answer\nthought[suffix="."]: /(?s:.*)/'
CALLS = Grammar(kind="lark", text='start: "[find(" /[0-9]{1,3}/ ")]"')
GRAMMARS = {
    "schema": Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    "object": Grammar(kind="json_object"),
    "regex": Grammar(kind="regex", text="(ab|cd){3,12}x"),
    "choice": Grammar(kind="choice", text=json.dumps(["harbor", "harbour master", "garden"])),
    "lark": Grammar(kind="lark", text='start: "(" item ("," item)* ")"\nitem: /[0-9]{1,3}/'),
    "regex or calls": Grammar(kind="regex", text=r"\[[a-z]{3,20}[.\])]", otherwise=CALLS),
    "choice behind a thought": Grammar(
        kind="choice", text='["harbor", "garden"]', frame=FRAME, otherwise=replace(CALLS, frame=FRAME)
    ),
}
DRAWN = {
    "greedy": Sampling(temperature=0),
    "seeded": Sampling(temperature=0.9, top_p=0.95, seed=5),
    "penalised": Sampling(
        temperature=0.7, seed=3, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=9
    ),
}


@pytest.fixture
def settings(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    """Extents of one state."""
    layers, _ = describe(bundled()["keeper"])
    monkeypatch.setattr(memory_plan, "layout_of", partial(layout_of, extent_bytes_min=1, granule_bytes=1))
    layout = layout_of(layers, P, extent_bytes_min=1, granule_bytes=1)
    sizes = {"page_size": P, "max_model_len": 120, "backing": "fixed"}
    return plain_settings(bundled()["keeper"], kernel_cache, EXTENTS * layout.extent_bytes, **sizes)


def requests() -> list[Request]:
    tokenizer = load_tokenizer(bundled()["keeper"])
    eos = json.loads((bundled()["keeper"] / "config.json").read_text())["eos_token_id"]
    return [
        Request(
            request_id=f"{kind}-{how}",
            tokens=tuple(tokenizer.encode(f"Alice keeps the {kind} in the harbor. Where is it? ")),
            max_new_tokens=NEW_TOKENS,
            sampling=replace(sampling, grammar=grammar),
            stop_token_ids=(eos,),
        )
        for kind, grammar in {**GRAMMARS, "key": None}.items()
        for how, sampling in DRAWN.items()
    ]


async def answers(
    settings: EngineSettings, asked: list[Request], *, shaken: bool = False, **changes: object
) -> list[list[int]]:
    """`shaken`: the memory shrinks to its floor and grows again all the time."""
    async with serving(settings, **changes) as built:
        shaking = asyncio.create_task(_shake(built)) if shaken else None
        found = await together(built, asked)
        if shaking is not None:
            shaking.cancel()
        counters = built.engine.load().counters
    if changes.get("num_speculative_tokens"):
        assert 0 < counters["spec_accepted_tokens"] < counters["spec_drafted_tokens"]
    assert (counters.get("preemptions_for_resize", 0) > 0) == shaken
    return found


async def _shake(built: BuiltEngine) -> None:
    while True:
        for budget_bytes in (built.info.memory_floor_bytes, built.info.memory_bytes):
            built.engine.resize(budget_bytes)
            await asyncio.sleep(SHAKE_S)


async def test_every_path_gives_the_answer_that_matches(settings: EngineSettings) -> None:
    asked = requests()
    plain = await answers(settings, asked, overlap=False)
    assert await answers(settings, asked) == plain
    assert await answers(settings, asked, num_speculative_tokens=4) == plain
    assert await answers(settings, asked, num_speculative_tokens=4, shaken=True) == plain
    assert await answers(settings, asked, overlap=False, shaken=True) == plain
    cuts = [min(number, len(tokens) - 1) for number, tokens in enumerate(plain)]
    moved = [
        replace(
            request, tokens=request.tokens + tuple(tokens[:cut]), drawn=cut, max_new_tokens=NEW_TOKENS - cut
        )
        for request, tokens, cut in zip(asked, plain, cuts, strict=True)
    ]
    rests = [tokens[cut:] for tokens, cut in zip(plain, cuts, strict=True)]
    assert await answers(settings, moved, num_speculative_tokens=4) == rests
    _check_grammars(asked, plain)


async def test_rows_that_sit_out_for_their_masks_answer_the_same(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some masks take much longer than a step waits, of quick and of slow rows, with steps in flight."""
    asked = requests()
    plain = await answers(settings, asked, overlap=False)
    monkeypatch.setattr(sampler, "MASKS_S_MAX", 0.002)
    monkeypatch.setattr(grammar, "UNPROVEN_S", 1.5 * grammar.QUICK_S_MAX)
    late, follow, lots = [0], grammar.Matcher._next, Random(1)

    def slow(matcher: grammar.Matcher) -> grammar.Mask:
        if lots.random() < 0.1:
            time.sleep(0.02)
        return follow(matcher)

    draw = model_runner.Sampler.draw

    def counting(
        self: model_runner.Sampler, logits_NV: torch.Tensor, rows: list[Row], tokens_N: torch.Tensor | None
    ) -> list[Drawn]:
        drawn = draw(self, logits_NV, rows, tokens_N)
        late[0] += sum(row_drawn.late for row_drawn in drawn)
        return drawn

    monkeypatch.setattr(grammar.Matcher, "_next", slow)
    monkeypatch.setattr(model_runner.Sampler, "draw", counting)
    for drafts_max in (0, 4):
        assert await answers(settings, asked, num_speculative_tokens=drafts_max) == plain
        assert late[0] > 0
        late[0] = 0


def _check_grammars(asked: list[Request], answered: list[list[int]]) -> None:
    """Check that finished answers match; the others ran out of tokens."""
    tokenizer = load_tokenizer(bundled()["keeper"])
    ended: list[str] = []
    for request, tokens in zip(asked, answered, strict=True):
        decoder = tokenizer.decoder()
        text = "".join(map(decoder.push, tokens[:-1]))
        if tokens[-1] not in request.stop_token_ids or request.sampling.grammar is None:
            continue
        name = request.request_id.rpartition("-")[0]
        ended.append(name)
        match name:
            case "schema":
                value = json.loads(text)
                assert set(value) == set(SCHEMA["properties"])
                assert 0 <= value["age"] <= 99
            case "object":
                assert isinstance(json.loads(text), dict)
            case "regex":
                assert re.fullmatch("(ab|cd){3,12}x", text)
            case "choice":
                assert text in {"harbor", "harbour master", "garden"}
            case "lark":
                assert re.fullmatch(r"\([0-9]{1,3}(,[0-9]{1,3})*\)", text)
            case "regex or calls":
                assert re.fullmatch(r"\[([a-z]{3,20}[.\])]|find\([0-9]{1,3}\)\])", text)
            case "choice behind a thought":
                assert re.fullmatch(r"[^.]*\.(harbor|garden|\[find\([0-9]{1,3}\)\])", text)
    assert {"regex", "choice", "regex or calls", "choice behind a thought"} <= set(ended)
