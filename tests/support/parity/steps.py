"""A small engine that runs any schedule of steps over a loaded model, with pages all over an arena of NaN."""

from dataclasses import dataclass, field

import torch

from tidemill.kernels.shared.fp8 import Fp8
from tidemill.kvstore.layout import KvDtype, Layout, Linear, Window, WindowId, layout_of
from tidemill.workers.models.architectures.registry import LoadedModel
from tidemill.workers.models.inputs import Inputs, caches_of

TOKENS_MAX = 4096
STATES = 16
NAN = 0xFF


@dataclass
class Sequence:
    """A sequence being fed: its tokens, how many are computed, and the memory it owns; 0 stands for a window
    page that it does not need any more, or not yet."""

    tokens: list[int]
    pages: list[int]
    windows: list[int]
    state: int
    computed: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class Runner:
    """Runs steps of a loaded model, or of a rank's part of it. Each kind of memory has extents of its own. A
    window page becomes NaN again when no token can see it any more."""

    def __init__(self, loaded: LoadedModel, page_tokens: int, kv_dtype: KvDtype = "float32") -> None:
        self.loaded = loaded
        self.layout: Layout = layout_of(loaded.local_layers, page_tokens, kv_dtype)
        num_pages = TOKENS_MAX // page_tokens
        per_extent = (
            (num_pages, self.layout.pages_per_extent),
            (num_pages if self.layout.has_windows else 0, self.layout.windows_per_extent),
            (STATES if self.layout.has_states else 0, self.layout.states_per_extent),
        )
        draw = torch.Generator().manual_seed(0)
        free: list[list[int]] = []
        extents = 0
        for count, count_of in per_extent:
            free.append([extents * count_of + int(i) for i in torch.randperm(count, generator=draw)])
            extents += -(-count // count_of) if count else 0
        self.free_pages, self.free_windows, self.free_states = free
        self.arena = torch.full((extents * self.layout.extent_bytes,), NAN, dtype=torch.uint8)
        self.caches = caches_of(self.layout, self.arena)

    def add(self, tokens: list[int], length: int | None = None) -> Sequence:
        """A sequence with memory for `length` tokens."""
        count = -(-(length or len(tokens)) // self.layout.page_tokens)
        pages = [self.free_pages.pop() for _ in range(count)]
        return Sequence(tokens, pages, [0] * count, self.free_states.pop() if self.free_states else -1)

    def step(self, batch: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Runs the next `n` tokens of each sequence. Returns the hidden states of the step."""
        for sequence, n in batch:
            self._take_windows(sequence, sequence.computed + n)
        hidden = self.loaded.model.forward(self.inputs(batch), self.caches)
        start = 0
        for sequence, n in batch:
            sequence.hidden.append(hidden[start : start + n])
            sequence.computed += n
            start += n
            self._drop_windows(sequence)
        return hidden

    def run(self, tokens: list[int], chunks: list[int]) -> torch.Tensor:
        """Logits of every token of one sequence fed in `chunks`."""
        sequence = self.add(tokens)
        for n in chunks:
            self.step([(sequence, n)])
        logits = self.loaded.model.logits(torch.cat(sequence.hidden))
        self.free_pages += sequence.pages
        self.free_windows += [window for window in sequence.windows if window]
        self.free_states += [sequence.state] if self.layout.has_states else []
        return logits

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens, the likeliest each time; the last prompt token is a step of its own."""
        sequence = self.add(list(prompt), len(prompt) + count)
        self.step([(sequence, len(prompt) - 1)])
        for _ in range(count):
            hidden = self.step([(sequence, 1)])
            sequence.tokens.append(int(self.loaded.model.logits(hidden).argmax()))
        return sequence.tokens[len(prompt) :]

    def inputs(self, batch: list[tuple[Sequence, int]]) -> Inputs:
        """Return the step of the next `n` tokens of each sequence."""

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        def table(rows: list[list[int]]) -> torch.Tensor:
            width = max(map(len, rows))
            return torch.stack([int32(row + [0] * (width - len(row))) for row in rows])

        ends = [sequence.computed + n for sequence, n in batch]
        windows_BN = table([s.windows for s, _ in batch])
        return Inputs(
            tokens_T=torch.tensor([t for (s, n) in batch for t in s.tokens[s.computed : s.computed + n]]),
            positions_T=torch.tensor([i for (s, n) in batch for i in range(s.computed, s.computed + n)]),
            cu_B1=int32([0, *(n for _, n in batch)]).cumsum(0).to(torch.int32),
            pages_BN=table([s.pages for s, _ in batch]),
            windows_BN=windows_BN if self.layout.has_windows else windows_BN[:, :0],
            lens_B=int32(ends),
            read_B=int32([s.state if s.computed else -1 for s, _ in batch]),
            writes_BK=int32([s.state for s, _ in batch])[:, None],
        )

    def _take_windows(self, sequence: Sequence, end: int) -> None:
        if self.layout.has_windows:
            tokens = self.layout.page_tokens
            for place in range(sequence.computed // tokens, -(-end // tokens)):
                sequence.windows[place] = sequence.windows[place] or self.free_windows.pop()

    def _drop_windows(self, sequence: Sequence) -> None:
        """Drop the pages that the next token, at `computed`, cannot see: all below `computed + 1 -
        window`."""
        if self.layout.has_windows:
            seen = max(0, sequence.computed + 1 - self.layout.window_tokens)
            for place in range(seen // self.layout.page_tokens):
                if sequence.windows[place]:
                    start = self.layout.window_offset(WindowId(sequence.windows[place]))
                    self.arena[start : start + self.layout.window_bytes].fill_(NAN)
                    self.free_windows.insert(0, sequence.windows[place])
                    sequence.windows[place] = 0


def check_memory(layout: Layout) -> None:
    """The layout is what the caches fill of an arena, each byte once."""
    arena = torch.zeros(layout.extent_bytes, dtype=torch.uint8)
    caches = caches_of(layout, arena)
    specs = [spec for spec in layout.layers if not isinstance(spec, Linear)]
    windows: list[torch.Tensor] = []
    pages: list[torch.Tensor] = []
    for kv, spec in zip(caches.kv, specs, strict=True):
        tensors = [kv] if not isinstance(kv, Fp8) else [kv.codes] if kv.is_fixed else list(kv)
        (windows if isinstance(spec, Window) else pages).extend(tensors)
    for name, views, num_bytes, count in (
        ("page", pages, layout.page_bytes, layout.pages_per_extent),
        ("window page", windows, layout.window_bytes, layout.windows_per_extent),
        ("state", [*caches.conv, *caches.temporal], layout.state_bytes, layout.states_per_extent),
    ):
        arena.zero_()
        for view in views:
            view.add_(1)
        numbers = arena.view(views[0].dtype) if views else arena
        filled_bytes = numbers.count_nonzero().item() * numbers.element_size()
        assert filled_bytes == num_bytes * count, f"{filled_bytes} bytes in {count} times {name}"
        assert not views or float(numbers.max()) == 1, f"layers share bytes of a {name}"
