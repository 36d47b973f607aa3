"""A whole hybrid with the Triton operators against the same with their definitions: prefill, then decode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.support.parity.architectures import random_model, save
from tests.support.parity.steps import Runner
from tidemill.kernels.dispatch import REFERENCE, Operators, operators
from tidemill.kvstore.layout import KvDtype
from tidemill.workers.models.architectures.registry import load, no_progress
from tidemill.workers.models.inputs import Kept

LENGTHS = (19, 5)
KEPT_K = torch.tensor([18, 22, 23])


def drawn_ids() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(97, (n,), generator=draw) for n in LENGTHS]


Schedule = list[list[tuple[int, int]]]
"""Steps: which of the two sequences run, and how many tokens of each."""

MIXED: Schedule = [[(0, 17)], [(1, 4), (0, 1)], [(0, 1), (1, 1)]]
"""Many tokens, mixed rows, and single tokens."""


def logits_of(folder: Path, ops: Operators, kv_dtype: KvDtype, schedule: Schedule = MIXED) -> torch.Tensor:
    """Return the logits of every token of two sequences."""
    model = load(folder, ops, no_progress)
    runner = Runner(model, page_tokens=16, kv_dtype=kv_dtype)
    sequences = [runner.add(ids.tolist()) for ids in drawn_ids()]
    with torch.inference_mode():
        for rows in schedule:
            runner.step([(sequences[index], count) for index, count in rows])
        return model.model.logits(torch.cat([*sequences[0].hidden, *sequences[1].hidden]))


@pytest.mark.parametrize("name", ["qwen3_next/moe-two-values", "granitemoehybrid/moe"])
def test_float32_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = save(random_model(name), tmp_path / "model")
    found, wanted = (logits_of(folder, ops, "float32") for ops in (operators("triton", tmp_path), REFERENCE))
    assert float(wanted.std()) > 1, "weights too small to tell right from wrong"
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-4


def test_last_layer_of_kept_tokens_alone(tmp_path: Path) -> None:
    """A row without draws keeps one token, another its guesses."""
    name = "qwen3_next/moe-two-values"
    model = load(save(random_model(name), tmp_path / "model"), operators("triton", tmp_path), no_progress)
    found_TH, wanted_TH = (
        runner.loaded.model.forward(
            runner.inputs([(runner.add(ids.tolist()), len(ids)) for ids in drawn_ids()]), runner.caches, kept
        )
        for kept in (Kept(KEPT_K, torch.tensor([0, 1, 3], dtype=torch.int32)), None)
        for runner in (Runner(model, page_tokens=16),)
    )
    assert float((found_TH - wanted_TH[KEPT_K]).abs().max() / wanted_TH.abs().max()) < 2e-4


def divergences(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler, of each token."""
    found, wanted = found.log_softmax(-1), wanted.log_softmax(-1)
    return torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)


def test_bfloat16_is_no_further_from_float32_than_in_transformers(tmp_path: Path) -> None:
    """Compare with the same bfloat16 weights; the definitions compute in float32. The median counts, because
    a token between two choices falls far either way."""
    ours, theirs = list[torch.Tensor](), list[torch.Tensor]()
    for seed in range(3):
        model = random_model("qwen3_next/dense-tied", seed).bfloat16()
        folder = save(model, tmp_path / f"model-{seed}")
        wanted = logits_of(folder, REFERENCE, "bfloat16")
        ours.append(divergences(logits_of(folder, operators("triton", tmp_path), "bfloat16"), wanted))
        with torch.inference_mode():
            outputs = [model(ids.unsqueeze(0), use_cache=False) for ids in drawn_ids()]
        theirs.append(divergences(torch.cat([output.logits[0].float() for output in outputs]), wanted))
    assert 0 < float(torch.cat(ours).median()) < float(torch.cat(theirs).median())


class Launches(TorchDispatchMode):
    """Names of what would run on a device: Triton's kernels, torch's operators but for views and memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._interprets = False
        run = GridExecutor.__call__

        def launch(kernel: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
            self.names.append(kernel.fn.__name__)
            self._interprets = True
            run(kernel, *arguments, **options)
            self._interprets = False

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        memory = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        is_new = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in memory
        if is_new and "empty" not in name and not self._interprets:
            self.names.append(name)
        return result


PRODUCT = ["to", "to", "linear"]  # of bfloat16 in float32: one launch on a device
LINEAR = ["linear", "convolve", "recur", "norm_gated_rows", "linear", "add_norm_rows"]
ATTENTION = [
    *("linear", "rotate_and_store", "list_entries", "attend_span", "add_spans", "linear", "add_norm_rows")
]
DENSE = ["linear", "silu_mul_part", "linear", "add_norm_rows"]
# Scores multiply weights that are kept in float32.
MOE = ["to", "linear", "choose", "gate_up_tile", "down_tile", "combine_norm"]


def test_launches_of_a_decode_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch converts bfloat16 between operators, and sums have no launch of their own."""
    raw = random_model(
        "qwen3_next/moe-two-values", shared_expert_intermediate_size=32, moe_intermediate_size=16
    )
    model = load(save(raw.bfloat16(), tmp_path / "model"), operators("triton", tmp_path), no_progress)
    runner = Runner(model, page_tokens=16, kv_dtype="bfloat16")
    sequence = runner.add([5, 6, 7])
    with torch.inference_mode():
        runner.step([(sequence, 2)])
        with Launches(monkeypatch) as launches:
            hidden_TH = runner.step([(sequence, 1)])
            model.model.logits(hidden_TH)
    angles = ["to", "mul", "cos", "sin", "stack"]
    names = launches.names[launches.names.index("embedding") - len(angles) :]
    layers = [*LINEAR, *DENSE, *LINEAR, *MOE, *LINEAR, *DENSE, *ATTENTION, *MOE]
    assert names == [*angles, "embedding", "add_norm_rows", *layers, *PRODUCT]
