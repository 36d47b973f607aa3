"""The guesses of a prediction head equal its definition; neither tokens nor pages depend on them."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.support.parity.heads import folder_with_head
from tests.support.parity.served import MIB, answer, one_by_one, serving, together, tokens_of
from tests.support.parity.steps import Runner
from tests.support.workers.padded import again
from tests.support.workers.settings import plain_settings
from tidemill.kernels.dispatch import Operators
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.engine import build
from tidemill.workers.execution.cuda_graphs import graph_shapes
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.step import Drawn, Row, Step
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.config import DRAFT
from tidemill.workers.models.architectures.registry import has_head, load
from tidemill.workers.models.errors import ModelError
from tidemill.workers.settings import EngineSettings

P = 16
NEW_TOKENS = 2 * P
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is often right."""
    return folder_with_head(tmp_path_factory.mktemp("models") / "agrees", agrees=True)


@pytest.fixture(scope="module")
def settings(folder: Path, kernel_cache: Path) -> EngineSettings:
    sizes = {"page_size": P, "tensor_parallel_sizes": (1, 2)}
    return plain_settings(folder, kernel_cache, 16 * MIB, num_speculative_tokens=3, **sizes)


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[str], str]:
    """The URL of a store, by name."""
    return lambda name: f"file://{tmp_path / name}?size=1GiB"


def requests() -> list[Request]:
    """One token, less than a page, and every way a prompt can end near a page boundary."""
    return [
        Request(
            request_id=f"{length}-{index}",
            tokens=tokens_of(length, seed=length),
            max_new_tokens=NEW_TOKENS,
            sampling=sampling,
        )
        for length in (1, P - 1, P, P + 1, 3 * P - 1)
        for index, sampling in enumerate(SAMPLINGS)
    ]


@pytest.fixture(scope="module")
def wanted(settings: EngineSettings) -> list[list[int]]:
    """Each alone, without guesses."""

    async def main() -> list[list[int]]:
        async with serving(settings, num_speculative_tokens=0, max_num_batched_tokens=4096) as built:
            return await one_by_one(built, requests())

    return asyncio.run(main())


async def answers(settings: EngineSettings, **changes: object) -> tuple[list[list[int]], dict[str, float]]:
    """Return concurrent answers, cold and then warm, and the counters."""
    async with serving(settings, **changes) as built:
        cold, warm = await together(built, requests()), await together(built, requests())
        assert warm == cold
        return cold, dict(built.engine.load().counters)


@pytest.mark.parametrize(("drafts_max", "overlap"), [(1, True), (3, True), (3, False)])
async def test_guesses_change_no_token(
    settings: EngineSettings, wanted: list[list[int]], drafts_max: int, *, overlap: bool
) -> None:
    found, counters = await answers(settings, num_speculative_tokens=drafts_max, overlap=overlap)
    assert found == wanted
    assert 0.2 < counters["spec_accepted_tokens"] / counters["spec_drafted_tokens"] < 0.9


async def test_preempted(settings: EngineSettings, wanted: list[list[int]]) -> None:
    fillers = [
        Request(request_id=f"filler {seed}", tokens=tokens_of(200 + seed, seed), max_new_tokens=100)
        for seed in range(16)
    ]
    async with serving(settings, memory_bytes=5 * MIB // 2) as built:
        beside = asyncio.create_task(together(built, fillers))
        assert await together(built, requests()) == wanted
        await beside
        assert built.engine.load().counters.get("preemptions", 0) > 0


def objects(folder: Path) -> dict[str, bytes]:
    """Return the objects of the store in a folder."""
    return {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "usage"
    }


async def test_pages_of_all_workers_are_alike_and_without_a_head_have_other_names(
    settings: EngineSettings, wanted: list[list[int]], tmp_path: Path, stored: Callable[[str], str]
) -> None:
    """A prefill worker makes pages in steps of any size, a decode worker token by token or guess by guess. A
    worker that fetches them, also in the middle of an answer, continues as if it had made them."""
    done = NEW_TOKENS - 2
    rests = [
        replace(request, tokens=request.tokens + tuple(tokens[:done]), max_new_tokens=2, drawn=done)
        for request, tokens in zip(requests(), wanted, strict=True)
    ]

    async with serving(settings, store_url=stored("a"), max_num_batched_tokens=40, max_num_seqs=4) as prefill:
        for rest in rests:
            assert (await prefill.engine.produce(rest)).depth == restorable_end(len(rest.tokens), P)
    async with serving(settings, store_url=stored("b"), num_speculative_tokens=5) as decode:
        assert [(await answer(decode, request))[0] for request in requests()] == wanted
    async with serving(settings, store_url=stored("c"), num_speculative_tokens=0) as without:
        await without.engine.produce(rests[-1])
    prefilled, decoded, others = (objects(tmp_path / name) for name in "abc")
    assert others
    assert not others.keys() & (prefilled | decoded).keys()
    assert len(prefilled.keys() & decoded.keys()) > len(requests()) * 2
    assert all(prefilled[name] == decoded[name] for name in prefilled.keys() & decoded.keys())
    async with serving(settings, store_url=stored("a")) as moved:
        for rest, tokens in zip(rests, wanted, strict=True):
            found, provenance = await answer(moved, rest)
            assert found == tokens[done:]
            assert provenance.fetched_tokens + provenance.reused_tokens == restorable_end(len(rest.tokens), P)


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Row, Drawn]]:
    """Every row that drew, and what it drew."""
    seen: list[tuple[Row, Drawn]] = []
    run_now = TorchRunner.run_now

    def recorded(self: TorchRunner, step: Step) -> list[Drawn]:
        found = run_now(self, step)
        seen.extend((row, row_drawn) for row, row_drawn in zip(step, found, strict=True) if row_drawn.tokens)
        return found

    monkeypatch.setattr(TorchRunner, "run_now", recorded)
    return seen


@pytest.mark.parametrize("graphs", [False, True])
async def test_guesses_are_those_of_the_definition(
    kernel_cache: Path,
    tmp_path: Path,
    cpu: Operators,
    guessed: list[tuple[Row, Drawn]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    graphs: bool,
) -> None:
    folder = folder_with_head(tmp_path / "dense", agrees=False, num_experts=0)
    changes = {"page_size": P, "num_speculative_tokens": 3, "max_num_batched_tokens": 20}
    made = plain_settings(folder, kernel_cache, 16 * MIB, **changes)
    asked = [request for request in requests() if not request.sampling.temperature]
    async with serving(made, num_speculative_tokens=0) as built:
        plain = await together(built, asked)
    open_runner = build.open_runner

    def opened(*parts: Any) -> TorchRunner:  # noqa: ANN401
        runner = open_runner(*parts)
        runner.use_graphs(graph_shapes(len(asked), 20, 3), 64, again)
        return runner

    if graphs:
        monkeypatch.setattr(build, "open_runner", opened)
    async with serving(made, speculative_method="mtp") as built:
        assert await together(built, asked) == plain, "wrong guesses change no token"
    whole = {
        request.request_id: [*request.tokens, *tokens] for request, tokens in zip(asked, plain, strict=True)
    }
    head, checked = Definition(folder, cpu, whole), 0
    for row, drawn in guessed:
        name = row.sequence_id.partition("#")[0]
        known = row.end - row.drafts + len(drawn.tokens)
        if drawn.guesses and known <= len(whole[name]):
            assert list(drawn.guesses) == head.guesses(name, known, len(drawn.guesses)), (name, known)
            checked += 1
    assert checked > len(asked) * NEW_TOKENS // 2


class Definition:
    """The head in plain torch, over whole texts and without pages: vLLM's Qwen3NextMultiTokenPredictor, but a
    token at the beginning of a page has nothing before it."""

    def __init__(self, folder: Path, ops: Operators, texts: dict[str, list[int]]) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.raw = json.loads((folder / "config.json").read_text())
        self.texts = texts
        loaded = load(folder, ops, lambda _done, _total: None)
        self.logits = loaded.model.logits
        self.hidden: dict[str, torch.Tensor] = {}
        for name, tokens in texts.items():
            runner = Runner(loaded, P)
            sequence = runner.add(tokens)
            runner.step([(sequence, len(tokens))])
            self.hidden[name] = torch.cat(sequence.hidden)

    def guesses(self, name: str, known: int, count: int) -> list[int]:
        """Return the guesses after the first `known` tokens."""
        tokens = self.texts[name][:known]
        before = torch.cat([torch.zeros_like(self.hidden[name][:1]), self.hidden[name][: known - 1]])
        before[: known - 1 : P] = 0
        while True:
            after = self._run(tokens, before)
            tokens = [*tokens, int(self.logits(after[-1:]).argmax())]
            before = torch.cat([before, after[-1:]])
            if len(tokens) == known + count:
                return tokens[known:]

    def _run(self, tokens: Sequence[int], before: torch.Tensor) -> torch.Tensor:
        embedded = self.tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
        token, before = (
            self._norm(embedded, "pre_fc_norm_embedding"),
            self._norm(before, "pre_fc_norm_hidden"),
        )
        x = self._linear(torch.cat([token, before], dim=1), "fc")
        x = x + self._attend(self._norm(x, "layers.0.input_layernorm"))
        h = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(h, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        return self._norm(x + self._linear(functional.silu(gate) * up, "layers.0.mlp.down_proj"), "norm")

    def _attend(self, h: torch.Tensor) -> torch.Tensor:
        dim, heads = self.raw["head_dim"], self.raw["num_attention_heads"]
        q, gate = self._linear(h, "layers.0.self_attn.q_proj").view(len(h), heads, 2 * dim).split(dim, dim=-1)
        k, v = (self._linear(h, f"layers.0.self_attn.{name}_proj").view(len(h), -1, dim) for name in "kv")
        q, k = (
            self._turn(self._norm(q, "layers.0.self_attn.q_norm")),
            self._turn(self._norm(k, "layers.0.self_attn.k_norm")),
        )
        k, v = (x.repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        return self._linear((attended * gate.sigmoid()).flatten(1), "layers.0.self_attn.o_proj")

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        turned = int(self.raw["head_dim"] * self.raw["partial_rotary_factor"])
        frequencies = self.raw["rope_theta"] ** -(torch.arange(0, turned, 2) / turned)
        angles = torch.outer(torch.arange(len(x)), frequencies)[:, None]
        first, second = x[..., : turned // 2], x[..., turned // 2 : turned]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
                x[..., turned:],
            ],
            dim=-1,
        )

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1 + self.tensors[f"mtp.{name}.weight"], 1e-6)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.tensors[f"mtp.{name}.weight"])


async def test_models_with_and_without_a_head(folder: Path, settings: EngineSettings, tmp_path: Path) -> None:
    assert has_head(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFT)},
        tmp_path / "model.safetensors",
    )
    shutil.copy(folder / "config.json", tmp_path)
    assert not has_head(tmp_path)
    without = replace(settings, model_folder=tmp_path)
    assert (await answers(without))[1]["spec_drafted_tokens"] > 0  # from the text
    with pytest.raises(ModelError, match="no prediction head"):
        await answers(without, speculative_method="mtp")
