"""A whole engine on the Triton operators, in the interpreter, against one on their definitions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.parity.architectures import random_model, save
from tests.support.parity.served import MIB, answer, serving, together
from tests.support.workers.padded import Bed, check_padding
from tests.support.workers.settings import plain_settings
from tidemill.kernels.dispatch import operators
from tidemill.workers.execution.cuda_graphs import padding
from tidemill.workers.messages import Request
from tidemill.workers.settings import EngineSettings

PAGE_TOKENS = 8
TINY = {
    "vocab_size": 8,  # so that answers repeat what was there, and are guessed
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "attention_bias": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(random_model("qwen3_next/moe-two-values", seed=12, **TINY), tmp_path / "model")


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> EngineSettings:
    sizes = {"page_size": PAGE_TOKENS, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    return plain_settings(folder, tmp_path, 16 * MIB, max_model_len=48, num_speculative_tokens=2, **sizes)


def request(name: str, tokens: list[int]) -> Request:
    return Request(request_id=name, tokens=tuple(tokens), max_new_tokens=5)


async def answers(settings: EngineSettings) -> tuple[list[list[int]], int, float]:
    """Return the answers to two concurrent prompts, one longer than a step, then to one that continues the
    first. Also return how many of its tokens were reused and how many guesses were right."""
    draw = torch.Generator().manual_seed(2)
    long = torch.randint(8, (19,), generator=draw).tolist()
    async with serving(settings) as built:
        tokens = await together(built, [request("long", long), request("short", [5, 6, 7, 5, 6])])
        then, provenance = await answer(built, request("again", [*long, *tokens[0], 3]))
        return [*tokens, then], provenance.reused_tokens, built.engine.load().counters["spec_accepted_tokens"]


async def test_greedy_tokens_are_those_of_the_definitions(settings: EngineSettings) -> None:
    wanted, reused, _ = await answers(replace(settings, kernels="reference"))
    found, reused_too, right = await answers(replace(settings, kernels="triton"))
    assert found == wanted
    assert reused == reused_too >= PAGE_TOKENS
    assert right


def test_padding_reads_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    def close_to(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)

    check_padding(
        folder,
        operators("triton", tmp_path),
        close_to,
        lengths=(1, 9, 17),
        chosen=[[0, 2, 1]],
        rows_max=4,
    )


def test_padding_of_many_tokens_writes_nothing(folder: Path, tmp_path: Path) -> None:
    """A runner warms up with such a step."""
    bed = Bed(folder, operators("triton", tmp_path), (1,))
    before = bed.memory()
    with torch.inference_mode():
        bed.model.forward(padding(2, 1, first=18), bed.caches)
    assert all(torch.equal(bits, old) for bits, old in zip(bed.memory(), before, strict=True))
