"""The properties of a model of any architecture: transformers' logits, and equal bits however it is
divided."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.parity.architectures import save
from tests.support.parity.sharded import (
    check,
    check_sums,
    over_gloo,
    run_rank,
    run_threads,
    sizes_of,
)
from tests.support.parity.steps import Runner, check_memory
from tests.support.waits import WAIT_S_MAX
from tidemill.kernels.dispatch import REFERENCE, Operators
from tidemill.kvstore.layout import layout_of
from tidemill.workers.models.architectures.registry import LoadedModel, load, no_progress
from tidemill.workers.parallel.shared_memory import SharedMemory

LENGTH = 150
PAGES = (1, 16, 64)
PAGE_TOKENS = 16
NEW_TOKENS = 200
ERROR_MAX = 1e-5
ERROR_MAX_LINEAR = 2e-4  # transformers computes linear attention chunk by chunk, in another order
DIVERGENCE_MAX = 1e-3
DIVERGENCE_RATIO_MAX = 1.5


def model_of(folder: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401  they have no types
    """Return the model as the class of transformers that config.json names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    return model.eval()


@dataclass
class Subject:
    """A model folder, and a folder to work in."""

    folder: Path
    ops: Operators
    half_ops: Operators  # with products in bfloat16
    scratch: Path
    page_sizes: tuple[int, ...] = PAGES

    @cached_property
    def ours(self) -> LoadedModel:
        return load(self.folder, self.ops, no_progress)

    @cached_property
    def theirs(self) -> Any:  # noqa: ANN401  as above
        return model_of(self.folder, torch.float32)

    def tokens(self, seed: int, count: int = LENGTH) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.ours.vocab_size, (count,), generator=generator).tolist()

    def edges(self, page_tokens: int) -> list[int]:
        """Prefixes that end at, before and behind the boundaries of a page and of a window, `LENGTH` at
        most."""
        window = layout_of(self.ours.layers, page_tokens).window_tokens
        places = {page_tokens, 2 * page_tokens, window, window + page_tokens, 2 * window - 1}
        found = {place + by for place in places for by in (-1, 0, 1)}
        return sorted(edge for edge in found if 0 < edge < LENGTH - 2)


def logits(subject: Subject) -> None:
    tokens = subject.tokens(1)
    with torch.no_grad():
        wanted = subject.theirs(torch.tensor([tokens])).logits[0]
    assert float(wanted.std()) > 1, "weights too small to tell right from wrong"
    runner, worst = Runner(subject.ours, PAGE_TOKENS), 0.0
    for cut in ([LENGTH], [64, 64, 13, *[1] * 9]):
        found = runner.run(tokens, cut)
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    allowed = ERROR_MAX_LINEAR if runner.layout.linear else ERROR_MAX
    assert worst < allowed, f"the error is {worst:.1e} of the largest logit"


def definitions(subject: Subject) -> None:
    """The operators of `reference.py`, which say what each of them means."""
    plain, tokens, cut = load(subject.folder, REFERENCE, no_progress), subject.tokens(2, 40), [33, 1, 6]
    wanted, found = (Runner(model, PAGE_TOKENS).run(tokens, cut) for model in (plain, subject.ours))
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < ERROR_MAX_LINEAR, f"the error is {error:.1e} of the largest logit"


def bfloat16(subject: Subject) -> None:
    """Weights, pages and products; against the same weights in float32, from which transformers in bfloat16
    is about as far. (Where a token's experts are nearly equal, one bit decides among them.) And equal bits
    however it is divided."""
    folder, tokens = subject.scratch / "bfloat16", subject.tokens(5)
    save(copy.deepcopy(subject.theirs).bfloat16(), folder)
    half = replace(subject, folder=folder, ops=subject.half_ops, scratch=folder, page_sizes=(PAGE_TOKENS,))
    found = Runner(half.ours, PAGE_TOKENS, "bfloat16").run(tokens, [64, 64, 13, *[1] * 9])
    with torch.no_grad():
        wanted, rounded = (
            model_of(folder, dtype)(torch.tensor([tokens])).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    kl, kl_theirs = divergence(found, wanted), divergence(rounded, wanted)
    assert kl < max(DIVERGENCE_MAX, DIVERGENCE_RATIO_MAX * kl_theirs), (
        f"divergence {kl:.1e} per token, in transformers {kl_theirs:.1e}"
    )
    for check_half in (cuts, batches, ranks):
        check_half(half)


def divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Kullback-Leibler, mean of the tokens."""
    found, wanted = found.log_softmax(-1), wanted.log_softmax(-1)
    return float(torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean"))


def greedy(subject: Subject) -> None:
    """Compare greedy answers. The most likely token of transformers after each of our tokens is the next of
    them: by induction it is its own greedy answer."""
    prompt = subject.tokens(7, 20)
    found = Runner(subject.ours, PAGE_TOKENS).greedy(prompt, NEW_TOKENS)
    with torch.no_grad():
        after = subject.theirs(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
    wrong = [place for place, token in enumerate(after.argmax(-1).tolist()) if token != found[place]]
    assert not wrong, f"they part at token {wrong[0]}"


def cuts(subject: Subject) -> None:
    tokens = subject.tokens(3)
    for page_tokens in subject.page_sizes:
        runner = Runner(subject.ours, page_tokens)
        wanted = runner.run(tokens, [LENGTH])
        assert torch.isfinite(wanted).all()
        schedules = [[1, 62, 1, 2, 63, 21], [1] * LENGTH]
        schedules += [[edge, 1, 1, LENGTH - edge - 2] for edge in subject.edges(page_tokens)]
        for schedule in schedules:
            assert torch.equal(runner.run(tokens, schedule), wanted), (page_tokens, schedule)


def batches(subject: Subject) -> None:
    """Odd rows decode while even rows prefill, and the order changes with every step; one thread or two."""
    runner = Runner(subject.ours, PAGE_TOKENS)
    prompts = [subject.tokens(seed, count) for seed, count in ((1, 90), (2, 33), (3, 5), (4, 64))]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    wanted = [runner.run(prompt, [len(prompt)]) for prompt in prompts]
    torch.set_num_threads(before)
    sequences = [runner.add(prompt) for prompt in prompts]
    while live := [(i, s) for i, s in enumerate(sequences) if s.computed < len(s.tokens)]:
        runner.step([(s, min(1 if i % 2 else 17, len(s.tokens) - s.computed)) for i, s in live])
        sequences.reverse()
    for s in sequences:
        found = subject.ours.model.logits(torch.cat(s.hidden))
        assert torch.equal(found, wanted[prompts.index(s.tokens)]), len(s.tokens)


def memory(subject: Subject) -> None:
    check_memory(layout_of(subject.ours.layers, PAGE_TOKENS))


def ranks(subject: Subject) -> None:
    """Each rank on a thread."""
    alone = run_rank(subject.folder, subject.ops)
    for size in sizes_of(subject.folder):
        meeting = subject.scratch / f"group of {size}"
        meeting.mkdir()
        meet = functools.partial(SharedMemory, meeting, size=size, wait_s_max=WAIT_S_MAX)
        check(run_threads(subject.folder, subject.ops, meet, size), alone)


def sums(subject: Subject) -> None:
    """Ranks that add up terms, over both kinds of exchange, with columns of experts and with whole ones."""
    alone, fitting = run_rank(subject.folder, subject.ops), sizes_of(subject.folder, by_expert=True)
    for size in sizes_of(subject.folder):
        for by_expert in (False, True) if size in fitting else (False,):
            meeting = subject.scratch / f"sums of {size}, {by_expert}"
            meeting.mkdir()
            meet = functools.partial(MEETINGS[size % 2], meeting, size=size, wait_s_max=WAIT_S_MAX)
            found = run_threads(subject.folder, subject.ops, meet, size, sums=True, by_expert=by_expert)
            check_sums(found, alone)


MEETINGS = (over_gloo, SharedMemory)

CHECKS: dict[str, Callable[[Subject], None]] = {
    holds.__name__: holds
    for holds in (logits, definitions, bfloat16, greedy, cuts, batches, memory, ranks, sums)
}
