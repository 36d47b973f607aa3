"""Build one of the other ranks of a group: its weights, its memory, its part of each step."""

from functools import partial
from pathlib import Path

import torch

from tidemill.kvstore.shards import rank_share, shards_of
from tidemill.workers.device import open_backing
from tidemill.workers.engine.build import mtp_of, open_arena_io, operators_of, with_compute_dtype
from tidemill.workers.engine.memory_plan import memory_of
from tidemill.workers.engine.runners import guesser_of
from tidemill.workers.execution.model_runner import outputs_of
from tidemill.workers.execution.mtp_drafter import DrawnEnd
from tidemill.workers.execution.step import PENDING, Step
from tidemill.workers.execution.step_tensors import inputs_of
from tidemill.workers.models.architectures.registry import load
from tidemill.workers.models.collectives import Ranks, Sharing
from tidemill.workers.models.inputs import caches_of
from tidemill.workers.parallel.frames import (
    NONE,
)
from tidemill.workers.parallel.group import WAIT_S_MAX
from tidemill.workers.parallel.rank import RankParts
from tidemill.workers.parallel.shared_memory import SharedMemory
from tidemill.workers.settings import EngineSettings
from tidemill.workers.transfer.transfer import RankTransfer


def build_rank(settings: EngineSettings, index: int, folder: Path) -> RankParts:
    """Meet the other ranks in `folder`, then load this rank's weights and reserve its memory. Raises the
    errors of `build_engine`."""
    settings, size = with_compute_dtype(settings), settings.tensor_parallel_size
    ranks = SharedMemory(folder, index, size, WAIT_S_MAX)
    loaded = load(
        settings.model_folder,
        operators_of(settings),
        _no_progress,
        Sharing(ranks, settings.sums, settings.by_expert),
        mtp=mtp_of(settings),
        compute_dtype=settings.compute_dtype,
        load_format=settings.load_format,
    )
    memory = memory_of(settings, loaded.local_layers, loaded.max_length)
    layout, backing = memory.layout, open_backing(settings, memory.reserved_bytes)
    share = rank_share(shards_of(loaded.layers, settings.group_sizes), index, size)
    transfer = RankTransfer(layout, open_arena_io(settings, layout, backing.memory, share), share)
    caches = caches_of(layout, backing.memory)
    guesser = guesser_of(settings, loaded, layout, caches)

    def run(step: Step) -> None:
        if not step:
            ranks.broadcast(torch.zeros(1))
            return
        tokens = _tokens(step, ranks)
        if tokens is None:
            return
        with torch.inference_mode():
            inputs = inputs_of(step, tokens, layout.page_tokens)
            outputs = outputs_of(loaded.model, loaded.model.forward(inputs, caches), step)
            ends = None if guesser is None else _ends(step, ranks)
            if guesser is not None and ends is not None:
                guesser.run(step, tokens, outputs.hidden_TH, ends, partial(_chosen, ranks))

    return RankParts(backing, transfer, run, settings.threads)


def _tokens(step: Step, ranks: Ranks) -> list[int] | None:
    """Return the tokens of the step, including those that only the leader knows. None: the leader calls the
    step off."""
    tokens = [token for row in step for token in row.tokens]
    if PENDING not in tokens:
        return tokens
    tokens_T = torch.tensor(tokens)
    ranks.broadcast(tokens_T)
    tokens: list[int] = tokens_T.numpy().tolist()
    return None if NONE in tokens else tokens


def _ends(step: Step, ranks: Ranks) -> list[DrawnEnd] | None:
    """Return what the leader drew; None when that failed."""
    ends_N2 = torch.zeros(len(step), len(DrawnEnd._fields), dtype=torch.int64)
    ranks.broadcast(ends_N2)
    ends = [DrawnEnd(*tokens) for tokens in ends_N2.numpy().tolist()]
    return None if any(end.num_drawn == NONE for end in ends) else ends


def _chosen(ranks: Ranks, _logits_NV: torch.Tensor, rows: Step) -> list[int]:
    """Return the guess of the leader."""
    tokens_N = torch.zeros(len(rows), dtype=torch.int64)
    ranks.broadcast(tokens_N)
    return tokens_N.numpy().tolist()


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    """Report nothing: the leader's progress stands for that of all ranks."""
