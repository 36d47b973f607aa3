"""Steps as CUDA graphs: one for each of a few numbers of rows and tokens, to which smaller steps are padded.

A step of few tokens is hundreds of short launches. Launching them takes the host longer than they take the
device. A graph is launched in one call, but with the shapes and the addresses of its capture. So each graph
has inputs of its own, and every step is written there: its rows, then rows of padding, which read and write
nothing. Page tables have their maximum width.

There are graphs for one token per row, for guesses of the same number in each row, and for steps with some
tokens beyond one per row: tails of prompts, and parts of them beside decoding rows. Those of the first two
kinds end with the head and with draws.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from tidemill.kernels.draw.tables import NO_ROOM, DrawField
from tidemill.kernels.shared.rows import MANY_ROWS
from tidemill.workers.models.inputs import Inputs, gathered, one_run

FEW_ROWS = (1, 2, 4)
BY_8_MAX = 64
MIXED_TOKENS = (16, 64, 128, 256, 512)  # beyond one per row
CHUNK = 64  # tokens of a prompt that run every prompt kernel

Forward = Callable[[], torch.Tensor]
Replay = Callable[[], None]
Capture = Callable[[Forward], tuple[Replay, torch.Tensor]]
"""Captures a function that computes a tensor. Returns a function that computes it again from the current
inputs, and the tensor with the result."""


def buckets(rows_max: int) -> tuple[int, ...]:
    """Return the numbers of rows, ascending: 1, 2, 4, in steps of 8 up to 64, and of 16 up to `rows_max`."""
    sizes = (*FEW_ROWS, *range(8, BY_8_MAX, 8), *range(BY_8_MAX, rows_max, 16))
    return (*(size for size in sizes if size < rows_max), rows_max)


class GraphShape(NamedTuple):
    """The rows of a graph, its tokens, and the states that a row may keep."""

    rows: int
    tokens: int
    states: int = 1

    @property
    def all_draw(self) -> bool:
        """True if every token may draw: rows have one, or guesses, and none has the tail of a prompt."""
        return self.tokens == self.rows * self.states


def graph_shapes(rows_max: int, tokens_max: int, drafts_max: int) -> tuple[GraphShape, ...]:
    """Return the shapes of all graphs. Those of mixed steps have one more row than there can be, for the
    tokens of their padding, and a row may keep the state after each of its tokens."""
    sizes, each = buckets(rows_max), 1 + drafts_max
    one_each = [GraphShape(rows, rows) for rows in sizes]
    guesses = [
        GraphShape(rows, rows * each, each) for rows in sizes if drafts_max and rows * each <= tokens_max
    ]
    mixed = [
        GraphShape(rows_max + 1, rows_max + more, 1 + more)
        for more in MIXED_TOKENS
        if rows_max + more <= tokens_max
    ]
    return *one_each, *guesses, *mixed


def choose(shapes: Iterable[GraphShape], rows: int, tokens: int, states: int) -> GraphShape | None:
    """Return the shape of the fewest tokens to which a step of `tokens` in `rows` can be padded, of these the
    one of the fewest rows; None: there is none. Each row of padding has a token at least, and padding of
    tokens alone has no row."""
    fits = [
        shape
        for shape in shapes
        if shape.states >= states
        and (shape[:2] == (rows, tokens) or 0 < shape.rows - rows <= shape.tokens - tokens)
    ]
    return min(fits, key=lambda shape: (shape.tokens, shape.rows), default=None)


def shapes(rows_max: int, tokens_max: int) -> list[tuple[int, int, int]]:
    """Return steps that launch every kernel that other steps launch, each as the number of rows, the
    tokens of the first row, and the states that a row may keep.

    Two of them need the most memory: a prompt of `tokens_max` alone, and one beside `rows_max` - 1 rows.

    Kernels are compiled for one token per row, for few more and for many more, for few rows and for many,
    for one state per row and for more, and by the number of tokens per expert.
    """
    counts = (1, *(1 << power for power in range(MANY_ROWS.bit_length(), rows_max.bit_length())), rows_max)
    one_each = [(rows, 1, 1) for rows in counts]
    many_each = [(rows, CHUNK, states) for rows in counts for states in (1, 2)]
    many_tokens = [(1, 1 << power, 1) for power in range(1, tokens_max.bit_length())]
    short = [(2, 2, 1)] if rows_max > 1 else []
    largest = [(1, tokens_max, 1), (rows_max, tokens_max - rows_max + 1, 1)]
    found = dict.fromkeys([*one_each, *short, *many_each, *many_tokens, *largest])
    return [shape for shape in found if shape[1] > 0 and shape[0] - 1 + shape[1] <= tokens_max]


def padding(rows: int, table_width: int, first: int = 1, *, windows: bool = False, states: int = 1) -> Inputs:
    """Return a step of padding rows, which reads and writes neither pages nor states. Each row has one token,
    the first has `first`. `windows`: the model has window pages. `states`: those that a row could keep."""
    tokens = rows - 1 + first if rows else 0
    return Inputs(
        tokens_T=torch.zeros(tokens, dtype=torch.int64),
        positions_T=torch.zeros(tokens, dtype=torch.int64),
        cu_B1=torch.tensor([0, *range(first, first + rows)], dtype=torch.int32),
        pages_BN=torch.zeros(rows, table_width, dtype=torch.int32),
        windows_BN=torch.zeros(rows, table_width * windows, dtype=torch.int32),
        lens_B=torch.zeros(rows, dtype=torch.int32),
        read_B=torch.full((rows,), -1, dtype=torch.int32),
        writes_BK=torch.full((rows, states), -1, dtype=torch.int32),
    )


def pad(step: Inputs, into: Inputs) -> None:
    """Make the first rows of `into` those of `step`, and the others padding, of which the first has the
    tokens that are left.

    Page tables beyond `lens` are not changed, because nothing reads them.
    """
    (rows, width), tokens = step.pages_BN.shape, len(step.tokens_T)
    kept, width_of_windows = step.writes_BK.shape[1], step.windows_BN.shape[1]
    for whole, part, empty in (
        (into.tokens_T, step.tokens_T, 0),
        (into.positions_T, step.positions_T, 0),
        (into.lens_B, step.lens_B, 0),
        (into.read_B, step.read_B, -1),
    ):
        whole[: len(part)] = part
        whole[len(part) :] = empty
    into.writes_BK.fill_(-1)
    into.writes_BK[:rows, -kept:] = step.writes_BK
    every, all_tokens = len(into.lens_B), len(into.tokens_T)
    into.cu_B1[: rows + 1] = step.cu_B1
    into.cu_B1[rows + 1 :] = torch.arange(all_tokens - (every - rows) + 1, all_tokens + 1)
    assert tokens <= all_tokens
    into.pages_BN[:rows, :width] = step.pages_BN
    into.windows_BN[:rows, :width_of_windows] = step.windows_BN


class GraphDraws:
    """The end of the graphs of up to `tokens_max` tokens that all may draw: their logits, and a token drawn
    from those of each as they are.

    draws_TF    float64, the table of draws by token, each with the room of its own; at first greedy
    logits_TV   float32, of the last replay
    tokens_T    int64, drawn by it; on other ranks of a group only what it shares
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        draw: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor],
        tokens_max: int,
        device: torch.device,
        *,
        share: Callable[[torch.Tensor], None] | None = None,
        keeps_logits: bool = True,
    ) -> None:
        """`logits` and `draw` are the model's; `share` copies the leader's tokens into those of other
        ranks."""
        self._logits, self._draw, self._share = logits, draw, share
        self._keeps_logits = keeps_logits
        self.draws_TF = torch.zeros(tokens_max, len(DrawField), dtype=torch.float64, device=device)
        self.draws_TF[:, DrawField.SOURCE] = torch.arange(tokens_max)
        self.draws_TF[:, DrawField.ROOM] = NO_ROOM
        self.tokens_T = torch.zeros(tokens_max, dtype=torch.int64, device=device)
        self.logits_TV = torch.empty(0, 0, device=device)

    def takes(self, shape: GraphShape) -> bool:
        return shape.all_draw and shape.tokens <= len(self.tokens_T)

    def fill(self, draws_TF: torch.Tensor) -> None:
        """Write the table of the next replay. What is behind it is drawn, too, and nothing reads that."""
        self.draws_TF[: len(draws_TF)] = draws_TF

    def compute(self, hidden_TH: torch.Tensor) -> None:
        """Compute, as a part of a graph. Ranks other than the leader have logits of width 0."""
        logits_TV = self._logits(hidden_TH)
        count, vocabulary = logits_TV.shape
        if self._keeps_logits:
            if not len(self.logits_TV):
                self.logits_TV = logits_TV.new_empty(len(self.tokens_T), vocabulary)
            logits_TV = self.logits_TV[:count].copy_(logits_TV)
        if vocabulary:
            self.tokens_T[:count] = self._draw(logits_TV, logits_TV[:0], self.draws_TF[:count], count)
        if self._share is not None:
            self._share(self.tokens_T[:count])


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph. `host` are views of `host_bytes`, which is copied to `device_bytes`, which `replay`
    reads; `inputs` are views of those. `draws`: its end, if it draws."""

    host: Inputs
    host_bytes: torch.Tensor
    device_bytes: torch.Tensor
    inputs: Inputs
    replay: Replay
    hidden_TH: torch.Tensor
    shape: GraphShape
    draws: GraphDraws | None

    def padded(self, step: Inputs) -> Inputs:
        """Return a step in host memory padded to this graph, in new memory. It has no tables."""
        into = empty_of(self.shape, 0)
        pad(step, into)
        return into

    def run(self, step: Inputs, tokens_T: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states of a step in host memory, which the host need not wait for. `tokens_T` are
        its tokens where only the device knows them."""
        device = self.device_bytes.device
        pinned = device.type == "cuda"
        no_tables = replace(step, pages_BN=step.pages_BN[:, :0], windows_BN=step.windows_BN[:, :0])
        numbers, _ = gathered(self.padded(no_tables), pinned=pinned)
        numbers = numbers.to(device, non_blocking=True)
        if tokens_T is not None:
            numbers[: tokens_T.nbytes].view(tokens_T.dtype).copy_(tokens_T)
        pages_BN = step.pages_BN.pin_memory() if pinned else step.pages_BN
        hidden_TH = self.run_there(numbers, pages_BN.to(device, non_blocking=True), step.windows_BN)
        return hidden_TH[: len(step.tokens_T)]

    def run_there(
        self, numbers: torch.Tensor, pages_BN: torch.Tensor, windows_BN: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states of a padded step on the device, which the host need not wait for.
        `numbers` (uint8) are the bytes of all that is not a table, arranged as in `one_run`."""
        tables_BN = self.inputs.pages_BN
        ends = tables_BN.storage_offset() * tables_BN.element_size()
        self.device_bytes[:ends].copy_(numbers[:ends])
        for table_BN, part_BN in ((tables_BN, pages_BN), (self.inputs.windows_BN, windows_BN)):
            if part_BN.shape[1]:
                table_BN[: len(part_BN), : part_BN.shape[1]] = part_BN
        self.replay()
        return self.hidden_TH


def empty_of(shape: GraphShape, table_width: int, *, windows: bool = False) -> Inputs:
    """Return the `padding` that fills a graph of this shape."""
    first = shape.tokens - shape.rows + 1
    return padding(shape.rows, table_width, first, windows=windows, states=shape.states)


class Graphs:
    """The graphs of a model for tables of up to `table_width` pages."""

    def __init__(
        self,
        forward: Callable[[Inputs], torch.Tensor],
        shapes: Iterable[GraphShape],
        table_width: int,
        device: torch.device,
        capture: Capture,
        *,
        windows: bool = False,
        draws: GraphDraws | None = None,
    ) -> None:
        """Capture all graphs, the largest first: the others fit into its memory. `draws` ends those that it
        takes."""
        self._table_width = table_width
        self._graphs: dict[GraphShape, Graph] = {}
        for shape in sorted(shapes, key=lambda shape: shape.tokens, reverse=True):
            empty = empty_of(shape, table_width, windows=windows)
            host_bytes, host = gathered(empty, pinned=device.type == "cuda")
            device_bytes, inputs = one_run(empty, device=device)
            device_bytes.copy_(host_bytes)
            end = draws if draws is not None and draws.takes(shape) else None
            replay, hidden_TH = capture(partial(_through, forward, inputs, end))
            self._graphs[shape] = Graph(host, host_bytes, device_bytes, inputs, replay, hidden_TH, shape, end)

    def most_hidden(self) -> torch.Tensor:
        """Return the hidden states of the graph of the most tokens."""
        return next(iter(self._graphs.values())).hidden_TH

    def graph_of(self, step: Inputs, width: int) -> Graph | None:
        """Return the graph for a step in host memory with tables of `width` pages, or None."""
        shape = choose(self._graphs, len(step.lens_B), len(step.tokens_T), step.writes_BK.shape[1])
        return None if shape is None or width > self._table_width else self._graphs[shape]

    def end_of(self, step: Inputs) -> GraphDraws | None:
        """Return the end of the graph of `forward`, if it draws."""
        graph = self.graph_of(step, step.pages_BN.shape[1])
        return None if graph is None else graph.draws

    def forward(self, step: Inputs) -> torch.Tensor | None:
        """Return the hidden states `[T, hidden]` of a step in host memory, valid until the next one. None: it
        fits into no graph. The step before has ended on the device."""
        graph = self.graph_of(step, step.pages_BN.shape[1])
        if graph is None:
            return None
        pad(step, graph.host)
        graph.device_bytes.copy_(graph.host_bytes, non_blocking=True)
        graph.replay()
        return graph.hidden_TH[: len(step.tokens_T)]


def _through(
    forward: Callable[[Inputs], torch.Tensor], inputs: Inputs, end: GraphDraws | None
) -> torch.Tensor:
    hidden_TH = forward(inputs)
    if end is not None:
        end.compute(hidden_TH)
    return hidden_TH


def cuda_capture(stream: torch.cuda.Stream) -> Capture:
    """Capture on `stream`, on which graphs are replayed, into memory that all of them share: one runs at a
    time. What other threads do with the device meanwhile is not captured."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Forward) -> tuple[Replay, torch.Tensor]:
        run()  # compiles, and allocates the memory of libraries: neither may happen during a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            computed = run()
        return graph.replay, computed

    return capture
