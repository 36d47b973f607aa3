"""A step on the ranks other than the leader: the same model calls in the same order, without draws.

The leader's side is group.py. Each rank has a stream, graphs and a warm-up of its own.
"""

from typing import Any

import torch

from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.mtp_drafter import DrawnEnd
from tidemill.workers.execution.step import PENDING, Drawn, Step
from tidemill.workers.parallel.exchange import Exchange
from tidemill.workers.parallel.frames import NONE


class RankRunner(TorchRunner):
    """Runs this rank's part of the leader's steps. Its methods block, on the caller's thread."""

    def __init__(self, exchange: Exchange, *runner: Any) -> None:  # noqa: ANN401  see GroupRunner
        super().__init__(*runner)
        self._exchange, self._ranks = exchange, exchange.model

    def run_now(self, step: Step) -> list[Drawn]:
        """Run this rank's part; an empty step ends when all ranks have met. Nothing is drawn."""
        if not step:
            self._exchange.control.broadcast(torch.zeros(1))
            return []
        tokens = self._known_tokens(step)
        if tokens is None:
            return []
        with torch.inference_mode(), self._on_stream():
            outputs = self._outputs(step, tokens)
            ends = None if self._guesser is None else self._ends(step)
            if self._guesser is not None and ends is not None:
                self._guesser.run(step, tokens, outputs.hidden_TH, ends, self._choose)
        return []

    def _known_tokens(self, step: Step) -> list[int] | None:
        """Return the tokens of the step, including those that only the leader knows. None: the leader calls
        the step off."""
        tokens = [token for row in step for token in row.tokens]
        if PENDING not in tokens:
            return tokens
        tokens_T = torch.tensor(tokens)
        self._exchange.control.broadcast(tokens_T)
        tokens: list[int] = tokens_T.numpy().tolist()
        return None if NONE in tokens else tokens

    def _ends(self, step: Step) -> list[DrawnEnd] | None:
        """Return what the leader drew; None when that failed."""
        ends_N2 = torch.zeros(len(step), len(DrawnEnd._fields), dtype=torch.int64)
        self._exchange.control.broadcast(ends_N2)
        ends = [DrawnEnd(*tokens) for tokens in ends_N2.numpy().tolist()]
        return None if any(end.num_drawn == NONE for end in ends) else ends

    def _choose(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the guess of the leader."""
        tokens_N = torch.zeros(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        self._share(tokens_N)
        return tokens_N
