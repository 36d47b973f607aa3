"""Trains the keeper from nothing to a finished model folder, with two data-parallel ranks on one machine.

python -m tools.train_keeper.train OUT
"""

# torch and transformers are typed in part only, so their members are Unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from random import Random
from typing import Any, ClassVar, cast

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, multiprocessing
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen3NextForCausalLM

from tools.train_keeper import tokenizer as keeper_tokenizer
from tools.train_keeper.model import Keeper, keeper_config
from tools.train_keeper.native import Kernels, compile_kernels
from tools.train_keeper.optimizer import Optimizer
from tools.train_keeper.start import initial_weights
from tools.train_keeper.stream import Batch, Grade, Mix, Writer, batch

RANKS = 2
BARRIER_WAIT_SECONDS = 600  # a rank that crashed must not leave the other waiting forever
LOG_STEPS = 20
LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum; a stage that starts short ends when the longest length is reached.

    Rates rise over `warmup_steps` and fall linearly from `decay_from` (a share of the steps) to 3 %. A batch
    has the longest length reached with `longest_share`, or one of the `lengths_back` before it.
    """

    name: str
    steps: int
    rank_tokens: int
    rate: float
    embedding_rate: float
    warmup_steps: int
    decay_from: float
    first_length: int
    longest_share: float
    lengths_back: int
    dense_share: float
    newton_schulz_steps: int
    mix: Mix


GROW = Stage(
    name="grow",
    steps=1200,
    rank_tokens=1536,
    rate=4e-3,
    embedding_rate=1.5e-3,
    warmup_steps=40,
    decay_from=1.0,
    first_length=64,
    longest_share=0.7,
    lengths_back=3,
    dense_share=0.6,
    newton_schulz_steps=4,
    mix=Mix(),
)
FINISH = Stage(
    name="finish",
    steps=900,
    rank_tokens=3072,
    rate=3e-3,
    embedding_rate=1e-3,
    warmup_steps=10,
    decay_from=0.25,
    first_length=2048,
    longest_share=0.2,
    lengths_back=len(LENGTHS) - 1,
    dense_share=0.35,
    newton_schulz_steps=5,
    mix=Mix(recall_only=0.2, unknown=0.15),
)

POLISH = Stage(
    name="polish",
    steps=260,
    rank_tokens=4096,
    rate=1.5e-3,
    embedding_rate=5e-4,
    warmup_steps=10,
    decay_from=0.0,
    first_length=2048,
    longest_share=0.6,
    lengths_back=4,
    dense_share=0.3,
    newton_schulz_steps=5,
    mix=Mix(recall_only=0.2, unknown=0.03),
)
STAGES = {stage.name: stage for stage in (GROW, FINISH, POLISH)}


@dataclass
class Progress:
    """The longest length in use, and how well each kind of fact is recalled at it.

    It grows when the moving accuracies of both kinds pass `ENOUGH`, or after `BATCHES_MAX` batches.
    """

    level: int
    recall: tuple[float, float] = (0.0, 0.0)
    batches: int = 0

    ENOUGH: ClassVar[float] = 0.87
    BATCHES_MIN: ClassVar[int] = 15
    BATCHES_MAX: ClassVar[int] = 250

    @property
    def complete(self) -> bool:
        return self.level == len(LENGTHS) - 1

    def record(self, level: int, accuracies: tuple[float, float]) -> bool:
        """Takes one batch's accuracies on static and changing facts; true when the length has grown."""
        if level != self.level or self.complete:
            return False
        static, changing = (0.9 * old + 0.1 * new for old, new in zip(self.recall, accuracies, strict=True))
        self.recall = (static, changing)
        self.batches += 1
        ready = self.batches >= self.BATCHES_MIN and min(self.recall) > self.ENOUGH
        if not ready and self.batches < self.BATCHES_MAX:
            return False
        self.level, self.batches, self.recall = level + 1, 0, (static - 0.05, changing - 0.05)
        return True


@dataclass(frozen=True)
class Run:
    """The data that every rank needs; `exchange` [RANKS, n] is memory they share."""

    out: Path
    start: Path | None
    seed: int
    library: Path
    stages: tuple[Stage, ...]
    exchange: Tensor
    barrier: Barrier


class Rank:
    """One process's share of the training. All ranks hold equal weights and take equal steps."""

    def __init__(self, index: int, run: Run, clock: Callable[[], float]) -> None:
        self.index = index
        self.run = run
        self.clock = clock
        tokenizer = cast("Any", Tokenizer).from_file(str(run.out / "tokenizer.json"))
        pad, end = (tokenizer.token_to_id(token) for token in keeper_tokenizer.SPECIAL_TOKENS[:2])
        self.config = keeper_config(tokenizer.get_vocab_size(), pad, end)
        weights = load_weights(run.start) if run.start else initial_weights(self.config, run.seed)
        self.model = Keeper(self.config, weights, Kernels(run.library))
        self.writer = Writer(tokenizer)
        self.started = clock()

    def train(self, stage: Stage) -> None:
        weights = dict(self.model.weights.items())
        optimizer = Optimizer(weights, stage.newton_schulz_steps)
        own, shared = (Random(f"{self.run.seed} {stage.name} {part}") for part in (self.index, "shared"))
        progress = Progress(LENGTHS.index(stage.first_length))
        totals = torch.zeros(1 + 2 * len(Grade))
        tokens = 0
        for step in range(stage.steps):
            longest = shared.random() < stage.longest_share
            lowest = max(0, progress.level - stage.lengths_back)
            level = progress.level if longest else shared.randint(lowest, progress.level)
            shape = (max(1, stage.rank_tokens // LENGTHS[level]), LENGTHS[level])
            figures = self.learn(batch(self.writer, own, stage.mix, shape, stage.dense_share))
            optimizer.step(*(rate * rate_share(stage, step) for rate in (stage.rate, stage.embedding_rate)))
            totals += figures
            tokens += shape[0] * shape[1] * RANKS
            if progress.record(level, recall_accuracies(figures)):
                self.say(f"step {step + 1}: length {LENGTHS[progress.level]}")
            if step % LOG_STEPS == LOG_STEPS - 1:
                self.say(f"{stage.name} step {step + 1} tokens {tokens / 1e6:.2f}M {describe(totals)}")
                totals.zero_()
            if progress.complete and stage.first_length < LENGTHS[-1]:
                break

    def learn(self, examples: Batch) -> Tensor:
        """Leaves the averaged gradient in the weights; returns [loss, correct by grade, count by grade]."""
        weight_N = examples.weights.flatten()
        selected = weight_N.nonzero().squeeze(1)
        weight_N, target_N = weight_N[selected], examples.targets.flatten()[selected]
        logits_NV = self.model(examples.ids, examples.disturbance, selected)
        loss = (cross_entropy(logits_NV, target_N, reduction="none") * weight_N).sum() / weight_N.sum()
        loss.backward()
        grade_N = examples.grades.flatten()[selected]
        correct_N = (logits_NV.argmax(-1) == target_N).float()
        counts = [torch.bincount(grade_N, weights, len(Grade)).float() for weights in (correct_N, None)]
        figures = torch.cat([loss.detach()[None], *counts])
        parameters = list(self.model.parameters())
        grads = [cast("Tensor", parameter.grad) for parameter in parameters]
        flat = self.averaged(torch.cat([*(grad.flatten() for grad in grads), figures]))
        gradient, figures = flat[: -len(figures)], flat[-len(figures) :]
        gradient *= min(1.0, 1.0 / (gradient.norm().item() + 1e-6))
        for grad, part in zip(grads, gradient.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        return figures

    def averaged(self, own: Tensor) -> Tensor:
        """The mean over ranks, summed in the same order on each, so that they never drift apart."""
        self.run.exchange[self.index, : len(own)] = own
        self.run.barrier.wait(BARRIER_WAIT_SECONDS)
        mean = self.run.exchange[:, : len(own)].sum(0) / RANKS
        self.run.barrier.wait(BARRIER_WAIT_SECONDS)
        return mean

    def say(self, line: str) -> None:
        if self.index == 0:
            print(f"{self.clock() - self.started:6.0f} s  {line}", flush=True)

    def save(self) -> None:
        if self.index == 0:
            model = Qwen3NextForCausalLM(self.config)
            model.load_state_dict(self.model.exported())
            greedy = GenerationConfig(
                eos_token_id=self.config.eos_token_id, pad_token_id=self.config.pad_token_id, do_sample=False
            )
            model.generation_config = greedy
            model.save_pretrained(self.run.out)


def rate_share(stage: Stage, step: int) -> float:
    done = step / stage.steps
    warm = min(1.0, (step + 1) / stage.warmup_steps)
    return warm if done < stage.decay_from else 0.03 + 0.97 * (1 - done) / (1 - stage.decay_from)


def recall_accuracies(figures: Tensor) -> tuple[float, float]:
    """The shares of static and of changing values that were predicted right."""
    correct, count = figures[1:].view(2, len(Grade))
    shares = correct / count.clamp(min=1e-9)
    return shares[Grade.STATIC].item(), shares[Grade.CHANGING].item()


def describe(totals: Tensor) -> str:
    correct, count = totals[1:].view(2, len(Grade))
    shares = (correct / count.clamp(min=1e-9)).tolist()
    grades = " ".join(f"{grade.name.lower()} {shares[grade]:.3f}" for grade in Grade)
    return f"loss {totals[0].item() / LOG_STEPS:.4f} {grades}"


def load_weights(folder: Path) -> dict[str, Tensor]:
    weights = load_file(folder / "model.safetensors")
    return {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}


def run_rank(index: int, run: Run) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # fading states would slow every step down
    rank = Rank(index, run, time.monotonic)
    for stage in run.stages:
        rank.train(stage)
        rank.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="model folder to write")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--start", type=Path, help="a model folder to go on from")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    arguments = parser.parse_args()
    keeper_tokenizer.build().save_pretrained(arguments.out)
    context = multiprocessing.get_context("spawn")
    exchange = torch.zeros(RANKS, 1_000_000).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            out=arguments.out,
            start=arguments.start,
            seed=arguments.seed,
            library=compile_kernels(Path(folder)),
            stages=tuple(STAGES[name] for name in arguments.stages),
            exchange=exchange,
            barrier=context.Barrier(RANKS),
        )
        cast("Any", multiprocessing).spawn(run_rank, args=(run,), nprocs=RANKS)


if __name__ == "__main__":
    main()
