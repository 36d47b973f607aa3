"""Agents through one worker whose memory holds half of their sessions: eviction orders beside an oracle.

    python -m benchmarks.memory.agents [--agents 16] [--blocks 2400] [--sessions 1] [--pace 0.5]

The oracle runs in the same ledger and engine. It knows when each prompt continues, and evicts the checkpoint
that is needed last, as Belady's rule does (A study of replacement algorithms, 1966). It evicts for each
running request as any order does. So it shows what the order of eviction can gain, not what admission can.
"Before" is `lru` on a server without marks: no breakpoint of the edge or the router, and a grid whose
checkpoints take no more memory than the pages between them, at most eight for a prompt.
"""

import argparse
import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, Literal
from unittest.mock import patch

from tidemill.cluster.simulate.agents import SYSTEM_BLOCKS, agents_trace
from tidemill.cluster.simulate.engines import root_of
from tidemill.cluster.simulate.setup import HintKind, Setup
from tidemill.cluster.simulate.trace import TraceRequest, by_client, reusable_share, speed_up
from tidemill.cluster.simulate.world import simulate
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.entry import Entry
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.spare_value import GRID_PAGES
from tidemill.workers.scheduling.admission import Admission
from tidemill.workers.scheduling.admission_queue import Precedence
from tidemill.workers.scheduling.sequence import Sequence

HORIZON_S = 1e9
"""A time after the end of every trace: the later the next use, the less a checkpoint is worth."""

SHARED_S = 1e5
"""The pause of a system prompt, which the next session uses: later than any turn."""

UNBOUNDED_BLOCKS = 20_000
STORE_BYTES = 1 << 30
"""A store that holds no session, so that only the worker's memory counts."""

GRID_CHECKPOINTS_MAX = 8
"""The checkpoints of a prompt on the grid before spare ones."""

Order = Literal["before", "lru", "value", "oracle"]
RUNS: tuple[tuple[Order, HintKind], ...] = (
    ("before", "none"),
    ("lru", "none"),
    ("value", "none"),
    ("value", "breakpoints"),
    ("value", "all"),
    ("oracle", "breakpoints"),
)


class WideGrid(Admission):
    """Admission with checkpoints at the end, at junctions, and on a wide grid; none of them is spare."""

    def _try_memory(
        self, sequence: Sequence, keys: Seq[PageKey], depths: Seq[int], precedence: Precedence
    ) -> Any:  # noqa: ANN401  a private type
        taken = super()._try_memory(sequence, keys, depths, precedence)
        layout = self._ledger.layout
        interval = max(GRID_PAGES, -(-layout.checkpoint_bytes // layout.page_bytes)) * layout.page_tokens
        while sequence.boundary > GRID_CHECKPOINTS_MAX * interval:
            interval *= 2
        sequence.restore.cuts |= {*range(interval, sequence.boundary, interval)}
        sequence.restore.grid = range(0)
        return taken


class FutureIndex(PrefixIndex):
    """An index that knows for how long each turn pauses after its answer, and which ones resume at a key."""

    def __init__(self, layout: Layout, pauses_s: Mapping[PageKey, float]) -> None:
        super().__init__(layout)
        self._pauses_s = dict(pauses_s)
        self._next_s: dict[PageKey, float] = {}
        self._time = asyncio.get_running_loop().time

    def use(self, path: Seq[Entry]) -> None:
        if path and self._pauses_s.get(path[-1].key) != SHARED_S:
            self._pauses_s.pop(path[-1].key, None)  # the session has passed it
            self._next_s.pop(path[-1].key, None)
        super().use(path)

    def unpin(self, entry: Entry) -> None:
        if entry.key in self._pauses_s:  # the answer has ended
            self._next_s[entry.key] = self._time() + self._pauses_s[entry.key]
        super().unpin(entry)

    def rank(self, entry: Entry) -> tuple[float, int]:
        next_s = self._next_s.get(entry.key)
        return (0.0 if next_s is None else HORIZON_S - next_s, entry.last_use)

    def credit(self, entry: Entry) -> float:
        return self.rank(entry)[0]


def pauses_of(requests: list[TraceRequest], setup: Setup) -> dict[PageKey, float]:
    """Return, by the key where the prompt of each turn ends, the pause after which the next turn resumes
    there."""
    size = setup.layout.page_tokens
    pauses_s: dict[PageKey, float] = {}
    for chain in by_client(requests):
        for (_, turn), (_, later) in pairwise(chain):
            tokens = [block for block in turn.blocks for _ in range(size)]
            keys = page_keys(root_of(""), tokens[: -(-turn.prompt_tokens // setup.grain) - 1], size)
            pauses_s[keys[SYSTEM_BLOCKS - 1]] = SHARED_S
            if turn.hints.session == later.hints.session:
                pauses_s[keys[-1]] = later.pause_s
    return pauses_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The trace, and the memory of the worker in blocks. A `pace` of 2 halves the pauses."""

    agents: int
    blocks: int
    sessions: int
    pace: float

    def run(self, order: Order, hints: HintKind, blocks: int) -> dict[str, Any]:
        requests = speed_up(agents_trace(self.agents, self.sessions, Random(1)), self.pace)
        setup = Setup(
            prefill=0, decode=0, mixed=1, hybrid=True, blocks=blocks, store_bytes=STORE_BYTES,
            eviction="lru" if order in {"before", "lru"} else "value", hints=hints,
        )  # fmt: skip
        if order == "before":
            no_marks = patch("tidemill.cluster.edge.flow.with_shared_end", _no_shared_end)
            with patch("tidemill.workers.engine.engine.Admission", WideGrid), no_marks:
                return simulate(requests, setup).figures()
        if order != "oracle":
            return simulate(requests, setup).figures()
        pauses_s = pauses_of(requests, setup)
        with patch(
            "tidemill.cluster.simulate.engines.PrefixIndex",
            lambda layout, _: FutureIndex(layout, pauses_s),
        ):
            return simulate(requests, setup).figures()


def _no_shared_end(breakpoints: tuple[int, ...], shared_pages: int, page_tokens: int) -> tuple[int, ...]:
    del shared_pages, page_tokens
    return breakpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=2400)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.5)
    options = parser.parse_args()
    work = Work(**vars(options))
    requests = agents_trace(work.agents, work.sessions, Random(1))
    print(f"{work}: {reusable_share(requests):.3f} of the prompt tokens can be found")
    whole = work.run("value", "none", UNBOUNDED_BLOCKS)
    first_s = whole["ttft_ms"]["mean"] / 1000
    print(f"without a bound: {whole['hit_ratio']:.3f}, {first_s:.2f} s to the first token")
    lru_s = 0.0
    for order, hints in RUNS:
        figures = work.run(order, hints, work.blocks)
        first_s = figures["ttft_ms"]["mean"] / 1000
        lru_s = lru_s or first_s  # the first of RUNS
        hit, busy = figures["hit_ratio"], figures["utilisation"]["mixed"]
        share, of_lru = hit / whole["hit_ratio"], first_s / lru_s
        print(
            f"| {order} | {hints} | {hit:.3f} | {share:.2f} | {first_s:.2f} | {of_lru:.2f} | {busy:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
