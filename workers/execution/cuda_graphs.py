"""Decode steps as CUDA graphs: one for each of a few numbers of rows, to which smaller steps are padded.

A step of one token per row is hundreds of short launches. Launching them takes the host longer than they take
the device. A graph is launched in one call, but with the shapes and the addresses of its capture. So each
graph has inputs of its own, and every step is written there: its rows, then rows of padding, which read and
write nothing. Page tables have their maximum width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidemill.kernels.shared.rows import MANY_ROWS
from tidemill.workers.models.inputs import Inputs, gathered, one_run

FEW_ROWS = (1, 2, 4)
BY_8_MAX = 64
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


def shapes(rows_max: int, tokens_max: int) -> list[tuple[int, int, int]]:
    """Return steps that launch every kernel that other steps launch, each as the number of rows, the
    tokens of the first row, and the states that a row may keep.

    Two of them need the most memory: a prompt of `tokens_max` alone, and one beside `rows_max` - 1 rows.

    Kernels are compiled for one token per row and for more, for few rows and for many, for one state per row
    and for more, and by the number of tokens per expert.
    """
    counts = (1, *(1 << power for power in range(MANY_ROWS.bit_length(), rows_max.bit_length())), rows_max)
    one_each = [(rows, 1, 1) for rows in counts]
    many_each = [(rows, CHUNK, states) for rows in counts for states in (1, 2)]
    many_tokens = [(1, 1 << power, 1) for power in range(1, tokens_max.bit_length())]
    largest = [(1, tokens_max, 1), (rows_max, tokens_max - rows_max + 1, 1)]
    found = dict.fromkeys([*one_each, *many_each, *many_tokens, *largest])
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
    """Make the first rows of `into` those of `step`, which have one token each, and the others padding.

    Page tables beyond `lens` are not changed, because nothing reads them.
    """
    rows, width = step.pages_BN.shape
    width_of_windows = step.windows_BN.shape[1]
    for whole, part, empty in (
        (into.tokens_T, step.tokens_T, 0),
        (into.positions_T, step.positions_T, 0),
        (into.lens_B, step.lens_B, 0),
        (into.read_B, step.read_B, -1),
        (into.writes_BK, step.writes_BK, -1),
    ):
        whole[:rows] = part
        whole[rows:] = empty
    into.pages_BN[:rows, :width] = step.pages_BN
    into.windows_BN[:rows, :width_of_windows] = step.windows_BN


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph. `host` are views of `host_bytes`, which is copied to `device_bytes`, which `replay`
    reads."""

    host: Inputs
    host_bytes: torch.Tensor
    device_bytes: torch.Tensor
    replay: Replay
    hidden_BH: torch.Tensor


class Graphs:
    """The graphs of a model for up to `rows_max` rows and tables of up to `table_width` pages."""

    def __init__(
        self,
        forward: Callable[[Inputs], torch.Tensor],
        rows_max: int,
        table_width: int,
        device: torch.device,
        capture: Capture,
        *,
        windows: bool = False,
    ) -> None:
        """Capture all graphs, the largest first: the others fit into its memory."""
        self._table_width = table_width
        self._graphs: dict[int, Graph] = {}
        for rows in reversed(buckets(rows_max)):
            empty = padding(rows, table_width, windows=windows)
            host_bytes, host = gathered(empty, pinned=device.type == "cuda")
            device_bytes, inputs = one_run(empty, device=device)
            device_bytes.copy_(host_bytes)
            replay, hidden_BH = capture(lambda inputs=inputs: forward(inputs))
            self._graphs[rows] = Graph(host, host_bytes, device_bytes, replay, hidden_BH)

    def forward(self, step: Inputs) -> torch.Tensor | None:
        """Return the hidden states `[T, hidden]` of a step in host memory, valid until the next one. None: a
        row has more than one token, or there are too many rows. The step before has ended on the device."""
        rows, width = step.pages_BN.shape
        sizes = [size for size in self._graphs if size >= rows]
        if (
            not sizes
            or len(step.tokens_T) != rows
            or step.writes_BK.shape[1] > 1
            or width > self._table_width
        ):
            return None
        graph = self._graphs[min(sizes)]
        pad(step, graph.host)
        graph.device_bytes.copy_(graph.host_bytes, non_blocking=True)
        graph.replay()
        return graph.hidden_BH[:rows]


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
