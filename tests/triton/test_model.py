# pyright: basic
# transformers' classes have no usable types.
"""A whole hybrid with the Triton operators against the same with their definitions: prefill, then decode."""

from pathlib import Path

import pytest
import torch

from tests.parity.hybrid import Runner, random_model, save
from tidemill.kernels.dispatch import REFERENCE, Operators, operators
from tidemill.kvstore.layout import KvDtype
from tidemill.workers.models.registry import load

LENGTHS = (19, 5)


def no_progress(_done: int, _total: int) -> None:
    pass


def logits_of(folder: Path, ops: Operators, kv_dtype: KvDtype) -> torch.Tensor:
    """Of every token of two sequences in steps of many tokens, of mixed rows, and of one token each."""
    model = load(folder, ops, no_progress)
    runner = Runner(model, page_tokens=16, kv_dtype=kv_dtype)
    draw = torch.Generator().manual_seed(3)
    first, second = (runner.add(torch.randint(97, (n,), generator=draw).tolist()) for n in LENGTHS)
    with torch.inference_mode():
        for rows in ([(first, 17)], [(second, 4), (first, 1)]):
            runner.step(rows)
        runner.step([(first, 1), (second, 1)])
        return model.model.logits(torch.cat(first.hidden + second.hidden))


@pytest.mark.parametrize("name", ["moe-two-values"])
def test_float32_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = save(random_model(name), tmp_path / "model")
    found, wanted = (logits_of(folder, ops, "float32") for ops in (operators("triton", tmp_path), REFERENCE))
    assert float(wanted.std()) > 1, "weights too small to tell right from wrong"
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-4


def test_bfloat16_weights_and_pages_stay_close(tmp_path: Path) -> None:
    folder = save(random_model("dense-tied").bfloat16(), tmp_path / "model")
    found, wanted = (logits_of(folder, ops, "bfloat16") for ops in (operators("triton", tmp_path), REFERENCE))
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert float(divergence) < 1e-2
