"""A prompt that starts while later slices of its pages arrive has the bits of one that waits for them."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mooncake import mooncake
from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import answer, serving, tokens_of
from tests.support.workers.settings import plain_settings
from tidemill.kvstore.keys import Kind
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.page_store import Got, Objects
from tidemill.kvstore.stores.remote_store import RemoteStore
from tidemill.workers.execution import model_runner as runner
from tidemill.workers.execution.step import Drawn, Row
from tidemill.workers.messages import Request, Sampling

P = 16
SLICE_S = 0.1
REQUEST = Request(
    request_id="", tokens=tokens_of(5 * P + 7, 1, first=0), max_new_tokens=8, sampling=Sampling(temperature=0)
)


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Record the logits of every draw."""
    seen: list[torch.Tensor] = []
    draw = runner.Sampler.draw

    def recorded(
        sampler: runner.Sampler, logits_NV: torch.Tensor, rows: list[Row], tokens_N: None = None
    ) -> list[Drawn]:
        seen.extend([logits_NV.clone()] * bool(len(logits_NV)))  # none in a step of `produce`
        return draw(sampler, logits_NV, rows, tokens_N)

    monkeypatch.setattr(runner.Sampler, "draw", recorded)
    return seen


@pytest.fixture
def slow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let views of a second slice hold NaN for a while."""
    for kind in (FileStore, RemoteStore):
        get = kind.get

        async def slowly(self: Any, wanted: Objects, get: Any = get) -> list[Got]:  # noqa: ANN401
            if any(key.kind is Kind.PAGE and key.shard for key, _ in wanted):
                for _, view in wanted:
                    view[:] = b"\xff" * view.nbytes
                time.sleep(SLICE_S)  # noqa: ASYNC251  the step runs on its thread meanwhile
            return await get(self, wanted)

        monkeypatch.setattr(kind, "get", slowly)


@contextmanager
def store_url(kind: str, folder: Path) -> Generator[str]:
    if kind == "folder":
        yield f"file://{folder}/store?timeout=10s"
        return
    with mooncake(folder / "log") as service:
        yield f"mooncake://{service.address}?ports=open&timeout=10s"


@pytest.mark.usefixtures("slow_slices")
@pytest.mark.parametrize("store", ["folder", "mooncake"])
@pytest.mark.parametrize("shape", ["qwen3", "qwen3_5", "deepseek_v3", "gpt_oss"])
async def test_logits_are_those_of_a_cold_prompt(
    shape: str, store: str, kernel_cache: Path, tmp_path: Path, logits: list[torch.Tensor]
) -> None:
    other = {"qwen3_5": "linear_attention", "gpt_oss": "sliding_attention"}.get(shape)
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention", other, "full_attention"]}
    changes: dict[str, Any] = layers if other else {}
    folder = save(random_model(shape, **changes), tmp_path / "model")
    sizes = {"page_size": P, "max_model_len": 160, "backing": "fixed", "page_slices": 2}
    settings = plain_settings(folder, kernel_cache, 64 << 20, **sizes)
    async with serving(settings, page_slices=1) as built:
        cold, _ = await answer(built, REQUEST)
    expected = list(logits)
    logits.clear()
    with store_url(store, tmp_path) as url:
        async with serving(settings, store_url=url) as built:
            await built.engine.produce(REQUEST)
        async with serving(settings, store_url=url) as built:
            tokens, provenance = await answer(built, REQUEST)
            counters = built.engine.load().counters
    assert (counters["early_starts"], counters.get("early_starts_lost", 0)) == (1, 0)
    assert provenance.fetched_tokens == 5 * P
    assert tokens == cold
    assert all(torch.equal(*pair) for pair in zip(logits, expected, strict=True))
