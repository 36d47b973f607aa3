"""How long the simulated workers take, and what their memory holds: figures, no bytes. Pure."""

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
"""A large accelerator: the polynomial of the replay studies of others, with a row of 0.1 ms and a store at
10 GB/s."""

NO_STORE_BYTES_PER_S = 1.0
"""What a worker says that has none: whatever is fetched comes too late. 0 would say that it does not know."""

PAIRLESS_CHUNK_TOKENS = 5000
"""Of a chunk as it is met most: where a cost by chunks is told as one without context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Of a worker's steps. `by_chunk`: each chunk of a prompt costs as if nothing were before it, as in the
    studies that placements are compared with; else a token also costs for each token before it.
    `speed.fetch_bytes_per_s` 0: there is no store."""

    speed: Speed = SPEED
    step_tokens: int = 8192
    by_chunk: bool = False

    def prefill_s(self, start: int, end: int) -> float:
        """Of the prompt tokens `[start, end)`."""
        if not self.by_chunk:
            return self.speed.prefill_s(start, end, self.step_tokens)
        chunks, rest = divmod(max(0, end - start), self.step_tokens)
        whole = self.speed.prefill_s(0, self.step_tokens, self.step_tokens)
        return chunks * whole + self.speed.prefill_s(0, rest, self.step_tokens)

    def tokens_s(self, start: int, end: int) -> float:
        """... without the step that they run in."""
        if self.by_chunk:
            start, end = 0, end - start
        return self.speed.prefill_s(start, end, max(1, end - start)) - self.speed.step_s

    def decode_s(self, rows: int) -> float:
        """Of a step of so many streams."""
        return self.speed.step_s + rows * self.speed.row_s

    def measured_speed(self, role: Role) -> Speed:
        """What a worker would measure of itself. Without a store streams still get the pages that were
        computed for them, from the worker that did."""
        speed = self.speed
        if not speed.fetch_bytes_per_s:
            rate = NO_STORE_BYTES_PER_S if role == "prefill" else SPEED.fetch_bytes_per_s
            speed = replace(speed, fetch_bytes_per_s=rate)
        if not self.by_chunk:
            return speed
        token_s = speed.token_s + speed.pair_s / 2 * PAIRLESS_CHUNK_TOKENS
        return replace(speed, token_s=token_s, pair_s=0.0)


def layout_for(*, hybrid: bool, grain: int) -> Layout:
    """The memory of a model with 24,576 B of KV per token, and 75 MiB of state if it is a hybrid. A page is a
    block of the trace; a token of it stands for `grain` tokens of the trace."""
    attention = Attention(kv_heads=ATTENTION.kv_heads * grain, head_dim=ATTENTION.head_dim)
    linear = [LINEAR] * (LINEAR_LAYERS if hybrid else 0)
    return layout_of((*[attention] * ATTENTION_LAYERS, *linear), BLOCK_TOKENS // grain, kv_dtype="bfloat16")
