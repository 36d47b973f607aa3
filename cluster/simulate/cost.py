"""The step times and memory sizes of simulated workers. Pure."""

from dataclasses import dataclass, replace

from tidemill.cluster.simulate.trace import BLOCK_TOKENS
from tidemill.kvstore.layout import Attention, Layout, Linear, layout_of
from tidemill.workers.messages import Role, Speed

ATTENTION = Attention(kv_heads=2, head_dim=256)
ATTENTION_LAYERS = 12
LINEAR = Linear(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
LINEAR_LAYERS = 36

SPEED = Speed(
    step_s=16.50142e-3, token_s=1.518344e-5, pair_s=2 * 4.209989e-10, row_s=1e-4, fetch_bytes_per_s=10e9
)
"""A large accelerator: the polynomial of replay studies, 0.1 ms per row, a store at 10 GB/s."""

NO_STORE_BYTES_PER_S = 1.0
"""The rate reported without a store: each fetch would be too slow. A rate of 0 means unknown."""

PAIRLESS_CHUNK_TOKENS = 5000
"""A typical chunk: a cost per chunk is reported as a cost per token at this length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The time of the steps of a worker.

    With `by_chunk` the chunks of a prompt cost the same at any depth, as in the studies that we
    compare with. Otherwise the cost of a token grows with the number of tokens before it. Without a
    store `speed.fetch_bytes_per_s` is 0.
    """

    speed: Speed = SPEED
    step_tokens: int = 8192
    by_chunk: bool = False

    def prefill_s(self, start: int, end: int) -> float:
        if not self.by_chunk:
            return self.speed.prefill_s(start, end, self.step_tokens)
        chunks, rest = divmod(max(0, end - start), self.step_tokens)
        whole = self.speed.prefill_s(0, self.step_tokens, self.step_tokens)
        return chunks * whole + self.speed.prefill_s(0, rest, self.step_tokens)

    def tokens_s(self, start: int, end: int) -> float:
        """Return the time for the prompt tokens `[start, end)` without the fixed cost of a step."""
        if self.by_chunk:
            start, end = 0, end - start
        return self.speed.prefill_s(start, end, max(1, end - start)) - self.speed.step_s

    def decode_s(self, rows: int) -> float:
        return self.speed.step_s + rows * self.speed.row_s

    def measured_speed(self, role: Role) -> Speed:
        """Return the speed that a worker would measure. Without a store, decode workers still get the pages
        of a prompt from its prefill worker."""
        speed = self.speed
        if not speed.fetch_bytes_per_s:
            rate = NO_STORE_BYTES_PER_S if role == "prefill" else SPEED.fetch_bytes_per_s
            speed = replace(speed, fetch_bytes_per_s=rate)
        if not self.by_chunk:
            return speed
        token_s = speed.token_s + speed.pair_s / 2 * PAIRLESS_CHUNK_TOKENS
        return replace(speed, token_s=token_s, pair_s=0.0)


def layout_for(*, hybrid: bool, grain: int) -> Layout:
    """Return the layout of a model with 24,576 B of KV per token, and 75 MiB of state if it is
    hybrid.

    A page is a block of the trace. A token of the page stands for `grain` tokens of the trace.
    """
    attention = Attention(kv_heads=ATTENTION.kv_heads * grain, head_dim=ATTENTION.head_dim)
    linear = [LINEAR] * (LINEAR_LAYERS if hybrid else 0)
    return layout_of((*[attention] * ATTENTION_LAYERS, *linear), BLOCK_TOKENS // grain, kv_dtype="bfloat16")
