"""A prediction head (MTP) for the finished keeper: trains it, and puts the two together.

python -m tools.train_keeper.head --train 700           makes tools/train_keeper/head.safetensors, in bfloat16
python -m tools.train_keeper.head --train 300 --go-on    ... from what is there
python -m tools.train_keeper.head OUT                    a model folder: the bundled keeper and the head

The keeper stays as it is. The head learns what the keeper finds likely next, from the hidden states of the
keeper and, with half the weight, from its own, because it goes on from these for its second guess and those
after it. Where a page of 64 tokens begins it sees no hidden state, as in serving. Every other batch is text
that the keeper wrote, for that is what it will have to guess.
"""

# torch and transformers are typed in part only, so their members are Unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from benchmarks.engine.run import Load, measure
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3NextConfig

from tidemill.workers.models.architectures.config import DRAFT, weights_of
from tidemill.workers.models.architectures.qwen3_next import draft_of, parse
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled
from tools.train_keeper.model import Disturbance, Keeper
from tools.train_keeper.native import Kernels, compile_kernels
from tools.train_keeper.stream import Mix, Writer, batch
from tools.train_keeper.train import load_weights

TRAINED = Path(__file__).parent / "head.safetensors"
WEIGHTS = "model.safetensors"
PAGE_TOKENS = 64
SHAPE = (6, 256)
ROWS = 600  # that the keeper writes
RATE = 4e-3
WARMUP_STEPS = 20
OWN_WEIGHT = 0.5  # of guesses from its own hidden states
LOG_STEPS = 25


class Head:
    """The layer of workers/models/architectures/mtp.py over whole rows, with gradients."""

    def __init__(self, raw: dict[str, Any], seed: int) -> None:
        config = replace(parse(raw), draft=draft_of(raw))
        generator = torch.Generator().manual_seed(seed)
        self.raw = raw
        self.tensors: dict[str, Tensor] = {}
        for name, weight in weights_of(config).items():
            if name.startswith(DRAFT):
                start = torch.zeros(weight.shape)  # of norms: their distance from 1
                if len(weight.shape) > 1:
                    start.normal_(0, weight.shape[1] ** -0.5, generator=generator)
                self.tensors[name.removeprefix(DRAFT)] = start.requires_grad_()

    def __call__(self, token_BTD: Tensor, before_BTD: Tensor) -> Tensor:
        both = [self._norm(token_BTD, "pre_fc_norm_embedding"), self._norm(before_BTD, "pre_fc_norm_hidden")]
        x_BTD = self._linear(torch.cat(both, dim=-1), "fc")
        x_BTD = x_BTD + self._attend(self._norm(x_BTD, "layers.0.input_layernorm"))
        h_BTD = self._norm(x_BTD, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(h_BTD, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        x_BTD = x_BTD + self._linear(functional.silu(gate) * up, "layers.0.mlp.down_proj")
        return self._norm(x_BTD, "norm")

    def _attend(self, h_BTD: Tensor) -> Tensor:
        dim, heads = self.raw["head_dim"], self.raw["num_attention_heads"]
        batch_size, length, _ = h_BTD.shape
        q_gate, k, v = (
            self._linear(h_BTD, f"layers.0.self_attn.{name}_proj").view(batch_size, length, count, -1)
            for name, count in (
                ("q", heads),
                *((name, self.raw["num_key_value_heads"]) for name in "kv"),
            )
        )
        q, gate = q_gate.split(dim, dim=-1)
        q, k = (
            self._turn(self._norm(x, f"layers.0.self_attn.{name}_norm")) for x, name in ((q, "q"), (k, "k"))
        )
        repeats = heads // k.shape[2]
        q, k, v = (
            x.transpose(1, 2) for x in (q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2))
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self._linear((attended * gate.sigmoid()).flatten(2), "layers.0.self_attn.o_proj")

    def _turn(self, x_BTHD: Tensor) -> Tensor:
        rope = self.raw["rope_parameters"]
        turned = int(self.raw["head_dim"] * rope["partial_rotary_factor"])
        frequencies = rope["rope_theta"] ** -(torch.arange(0, turned, 2) / turned)
        angles = torch.outer(torch.arange(x_BTHD.shape[1]), frequencies)[:, None]
        first, second, kept = x_BTHD.split([turned // 2, turned // 2, x_BTHD.shape[-1] - turned], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, kept], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], 1 + self.tensors[f"{name}.weight"], 1e-6)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"])


def shifted(hidden_BTD: Tensor) -> Tensor:
    """Shift by one token: zeros at the beginning of a page."""
    before = torch.cat([torch.zeros_like(hidden_BTD[:, :1]), hidden_BTD[:, :-1]], dim=1)
    starts = torch.arange(before.shape[1]) % PAGE_TOKENS == 0
    return before.masked_fill(starts[None, :, None], 0.0)


def written(writer: Writer, rng: Random) -> Tensor:
    """Rows that the keeper has gone on with, one half likeliest tokens, one half drawn; [N, T]."""
    half = SHAPE[1] // 2
    prompts = batch(writer, rng, Mix(), (ROWS, half), 0.3).ids.numpy().tolist()
    rows: list[list[int]] = []
    with tempfile.TemporaryDirectory() as scratch:
        settings = EngineSettings(
            model_folder=bundled()["keeper"],
            memory_bytes=256 << 20,
            store_url="memory:?size=0",
            cache_folder=Path(scratch),
        )
        for temperature, some in ((0.0, prompts[::2]), (1.0, prompts[1::2])):
            run = measure(settings, Load(prompts=some, new_tokens=SHAPE[1] - half, temperature=temperature))
            rows += [prompt + tokens for prompt, tokens in zip(some, run.tokens, strict=True)]
    return torch.tensor(rows)


def train(keeper: Keeper, head: Head, writer: Writer, steps: int, seed: int) -> None:
    rng, began_s = Random(seed), time.monotonic()
    own_NT = written(writer, rng)
    embedding = keeper.weights["embedding"].detach()
    optimizer = torch.optim.AdamW(head.tensors.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    undisturbed = Disturbance(torch.zeros(SHAPE), torch.arange(SHAPE[1]).repeat(SHAPE[0], 1))
    right = [0.0, 0.0]
    for step in range(steps):
        if step % 2:
            ids_BT = own_NT[rng.sample(range(len(own_NT)), SHAPE[0])]
        else:
            ids_BT = batch(writer, rng, Mix(), SHAPE, 0.3).ids
        with torch.no_grad():
            hidden_BTD = keeper.hidden(ids_BT, undisturbed)
            wanted_BTV = functional.linear(hidden_BTD, embedding).softmax(dim=-1)
        token_BTD = embedding[ids_BT]
        own_BTD = head(token_BTD, shifted(hidden_BTD))
        losses = []
        for number, guessed_BTD in enumerate((own_BTD, head(token_BTD, shifted(own_BTD)))):
            logits_BTV = functional.linear(guessed_BTD, embedding)
            losses.append(functional.cross_entropy(logits_BTV.flatten(0, 1), wanted_BTV.flatten(0, 1)))
            same = logits_BTV.argmax(-1) == wanted_BTV.argmax(-1)
            right[number] += same.float().mean().item() / LOG_STEPS
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARMUP_STEPS, 1 - step / steps)
        optimizer.zero_grad()
        (losses[0] + OWN_WEIGHT * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(head.tensors.values(), 1.0)
        optimizer.step()
        if step % LOG_STEPS == LOG_STEPS - 1:
            agreed = " ".join(f"{share:.3f}" for share in right)
            print(f"{time.monotonic() - began_s:5.0f} s  step {step + 1}: agrees {agreed}", flush=True)
            right = [0.0, 0.0]


def trained(steps: int, seed: int, *, go_on: bool) -> dict[str, Tensor]:
    source = bundled()["keeper"]
    raw = json.loads((source / "config.json").read_text())
    head = Head(raw, seed)
    if go_on:
        for name, tensor in load_file(TRAINED).items():
            head.tensors[name.removeprefix(DRAFT)].data.copy_(tensor)
    writer = Writer(cast("Any", Tokenizer).from_file(str(source / "tokenizer.json")))
    with tempfile.TemporaryDirectory() as folder:
        kernels = Kernels(compile_kernels(Path(folder)))
        keeper = Keeper(Qwen3NextConfig(**raw), load_weights(source), kernels)
        train(keeper, head, writer, steps, seed)
    return {f"{DRAFT}{name}": tensor.detach().bfloat16() for name, tensor in head.tensors.items()}


def keeper_with_head(folder: Path) -> Path:
    source = bundled()["keeper"]
    shutil.copytree(source, folder)
    both = load_file(source / WEIGHTS) | load_file(TRAINED)
    save_file(both, folder / WEIGHTS)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", help="model folder to write")
    parser.add_argument("--train", type=int, metavar="STEPS")
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.train:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # fading states would slow every step down
        save_file(trained(given.train, given.seed, go_on=given.go_on), TRAINED)
    if given.out:
        keeper_with_head(given.out)


if __name__ == "__main__":
    main()
