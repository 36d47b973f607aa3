"""Models pool what transformers computes, with the same bits on every path."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import MIB, serving, tokens_of
from tests.support.workers.settings import plain_settings
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.messages import Delta, Pooling, Provenance, Request, RequestError
from tidemill.workers.settings import EngineSettings

P = 16
LENGTHS = (1, 15, 16, 17, 49, 90)
NO, YES = 41, 7
LAST_TOKEN = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}

Reference = Callable[[torch.Tensor], torch.Tensor]
Made = tuple[Path, dict[str, Any], Pooling, Reference]


def embedder(folder: Path) -> Made:
    """A folder like Qwen3-Embedding: without a head, and without the prefix of tensors."""
    base = random_model("qwen3").model
    save(base, folder)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": f"{index}_{name}"}
               for index, name in enumerate(("Transformer", "Pooling", "Normalize"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(LAST_TOKEN))
    return folder, {}, Pooling(kind="embed", size=48), lambda ids: base(ids).last_hidden_state[0, -1]


def hybrid(folder: Path) -> Made:
    model = random_model("qwen3_next")
    save(model, folder)
    size = model.config.hidden_size
    state: Reference = lambda ids: model.model(ids).last_hidden_state[0, -1]  # noqa: E731
    return folder, {"runner": "pooling"}, Pooling(kind="embed", size=size), state


def reranker(folder: Path) -> Made:
    """A folder like Qwen3-Reranker: a model that generates."""
    model = random_model("qwen3")
    save(model, folder)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": NO, "yes": YES}}}))
    pooling = Pooling(kind="classify", size=2)
    return folder, {"convert": "classify"}, pooling, lambda ids: model(ids).logits[0, -1, [NO, YES]]


def classifier(folder: Path) -> Made:
    config = random_model("qwen3").config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(3)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    save(model, folder)
    return folder, {}, Pooling(kind="classify", size=1), lambda ids: model(ids).logits[0]


MADE = (embedder, hybrid, reranker, classifier)


def asked(length: int) -> Request:
    return Request(request_id=f"{length}", tokens=tokens_of(length, length), max_new_tokens=0, pools=True)


async def pooled(built: BuiltEngine, request: Request) -> tuple[bytes, Provenance]:
    deltas: list[Delta] = []
    await built.engine.stream(request, deltas.append)
    (delta,) = deltas
    assert delta.finish == "stop"
    assert delta.provenance is not None
    return delta.pooled, delta.provenance


def settings_of(made: Made, kernels: Path) -> EngineSettings:
    folder, purpose, *_ = made
    sizes = {"page_size": P, "max_model_len": max(LENGTHS)}
    return plain_settings(folder, kernels, 24 * MIB, backing="fixed", **sizes, **purpose)


async def alone(settings: EngineSettings) -> list[bytes]:
    """Return what is pooled for each prompt by itself, in one step."""
    async with serving(settings) as built:
        return [(await pooled(built, replace(asked(n), salt=f"{n}")))[0] for n in LENGTHS]


@pytest.mark.parametrize("make", MADE)
async def test_pools_what_transformers_computes(
    make: Callable[[Path], Made], kernel_cache: Path, tmp_path: Path
) -> None:
    made = make(tmp_path / "model")
    _, _, pooling, reference = made
    settings = settings_of(made, kernel_cache)
    async with serving(settings) as built:
        assert built.info.pooling == pooling
        with pytest.raises(RequestError, match="embeddings and scores alone"):
            await built.engine.stream(replace(asked(3), pools=False, max_new_tokens=1), lambda _: None)
    for found, length in zip(await alone(settings), LENGTHS, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([tokens_of(length, length)])).float().numpy()
        numbers = np.frombuffer(found, "<f4")
        assert numbers.shape == (pooling.size,)
        np.testing.assert_allclose(numbers, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("make", MADE)
async def test_every_path_pools_the_same_bits(
    make: Callable[[Path], Made], kernel_cache: Path, tmp_path: Path
) -> None:
    settings = settings_of(make(tmp_path / "model"), kernel_cache)
    wanted = dict(zip(LENGTHS, await alone(settings), strict=True))
    assert len(set(wanted.values())) == len(LENGTHS)

    async def check(built: BuiltEngine, source: str | None = None) -> None:
        found = await asyncio.gather(*(pooled(built, asked(n)) for n in LENGTHS))
        for length, (bits, provenance) in zip(LENGTHS, found, strict=True):
            assert bits == wanted[length], f"{length} tokens, {provenance}"
            assert source is None or getattr(provenance, source) == restorable_end(length, P)

    store = {"store_url": f"file://{tmp_path}/store?size=1GiB"}
    async with serving(settings, **store, max_num_batched_tokens=20, max_num_seqs=3) as built:
        await check(built)
        await check(built, "reused_tokens")
    async with serving(settings, **store) as built:
        await check(built, "fetched_tokens")
    async with serving(settings, tensor_parallel_size=2) as built:
        await check(built)
        await check(built, "reused_tokens")


async def test_a_worker_that_only_computes_prompts_pools(kernel_cache: Path, tmp_path: Path) -> None:
    async with serving(settings_of(embedder(tmp_path / "model"), kernel_cache)) as built:
        wanted, _ = await pooled(built, asked(49))
        for produces in (True, False):
            built.engine.restrict(produces=produces, generates=not produces)
            assert (await pooled(built, asked(49)))[0] == wanted
