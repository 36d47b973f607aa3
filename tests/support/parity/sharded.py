"""One schedule of steps over a model that ranks share, each on a thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from tests.support.parity.steps import Runner
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.shared.quantization import Quantization
from tidemill.workers.models.architectures.registry import describe, load
from tidemill.workers.models.collectives import ALONE, Ranks, Sharing
from tidemill.workers.models.errors import ModelError
from tidemill.workers.parallel.distributed import Distributed, folder_store
from tidemill.workers.parallel.shared_memory import SharedMemory

SUMS_ERROR_MAX = 1e-5
PAGE_TOKENS = 8
SIZES = (2, 3, 4)
LENGTHS = (37, 22)
STEPS: tuple[tuple[int, int], ...] = ((11, 0), (17, 9), (1, 5), (1, 1), (4, 1), (1, 3), (1, 1), (1, 2))
"""Tokens of each sequence in each step: prefill, chunks beside decode, decode."""

Met = Distributed | SharedMemory


class Found(NamedTuple):
    """The results of a rank for every token of `STEPS`. Logits and fingerprint are the leader's."""

    fingerprint: str
    hidden_TH: torch.Tensor
    logits_TV: torch.Tensor


def over_gloo(folder: Path, index: int, size: int, wait_s_max: float) -> Distributed:
    """Meet the other ranks of this machine in a folder."""
    return Distributed(folder_store(folder, size), index, size, "gloo", wait_s_max)


@torch.inference_mode()
def run_rank(
    folder: Path,
    ops: Operators,
    ranks: Ranks = ALONE,
    *,
    sums: bool = False,
    by_expert: bool = False,
    quantization: Quantization | None = None,
) -> Found:
    sharing = Sharing(ranks, sums, by_expert)
    loaded = load(folder, ops, lambda _done, _total: None, sharing, quantization=quantization)
    runner = Runner(loaded, PAGE_TOKENS)
    rng = Random(1)
    sequences = [runner.add([rng.randrange(loaded.vocab_size) for _ in range(n)]) for n in LENGTHS]
    hidden: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for counts in STEPS:
        rows = [(sequence, n) for sequence, n in zip(sequences, counts, strict=True) if n]
        hidden.append(runner.step(rows))
        logits.append(loaded.model.logits(hidden[-1]))
    assert [sequence.computed for sequence in sequences] == list(LENGTHS)
    return Found(loaded.fingerprint, torch.cat(hidden), torch.cat(logits))


def run_threads(
    folder: Path,
    ops: Operators,
    meet: Callable[[int], Met],
    size: int,
    *,
    sums: bool = False,
    by_expert: bool = False,
    quantization: Quantization | None = None,
) -> list[Found]:
    """Return the results of every rank, each on a thread with its own weights and caches."""

    def run(index: int) -> Found:
        with closing(meet(index)) as ranks:
            return run_rank(folder, ops, ranks, sums=sums, by_expert=by_expert, quantization=quantization)

    with ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return list(threads.map(run, range(size)))


def check(found: list[Found], alone: Found) -> None:
    """All ranks have the bits of one process."""
    assert float(alone.logits_TV.std()) > 0.3, "weights too small to tell right from wrong"
    for rank in found:
        assert torch.equal(rank.hidden_TH, alone.hidden_TH)
    assert torch.equal(found[0].logits_TV, alone.logits_TV)
    for rank in found[1:]:
        assert rank.logits_TV.shape == (len(alone.logits_TV), 0)


def check_sums(found: list[Found], alone: Found) -> None:
    """Check that all ranks have the same bits, which differ from those of one process by the rounding of
    sums."""
    for rank in found[1:]:
        assert torch.equal(rank.hidden_TH, found[0].hidden_TH)
    difference_TV = found[0].logits_TV - alone.logits_TV
    error = float(difference_TV.square().sum().sqrt() / alone.logits_TV.square().sum().sqrt())
    assert error < SUMS_ERROR_MAX, f"the error is {error:.1e} of the logits"
    assert found[0].fingerprint != alone.fingerprint, "they would share pages"


def sizes_of(folder: Path, *, by_expert: bool = False) -> list[int]:
    """Return those of `SIZES` that can share the model, its experts whole."""

    def fits(size: int) -> bool:
        try:
            describe(folder, size, by_expert=by_expert)
        except ModelError:
            return False
        return True

    return [size for size in SIZES if fits(size)]
