"""The settings of a simulation, as plain data."""

from dataclasses import dataclass, field
from typing import Literal

from tidemill.cluster.router.compiled import CompiledPlacement
from tidemill.cluster.simulate.cost import StepCost, layout_for
from tidemill.cluster.simulate.engines import ROWS_MAX
from tidemill.cluster.simulate.heartbeats import LOOK_S
from tidemill.cluster.simulate.policies import OURS
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.messages import Role, WorkerId, WorkerInfo
from tidemill.workers.settings import ITL_TARGET_CUDA_S

NEVER_S = 1e9
"""A limit of the time to first token that no prediction exceeds."""

EngineKind = Literal["real", "model"]
SpreadKind = Literal["edge", "family"]
HintKind = Literal["all", "breakpoints", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster and its placement policy.

    `blocks` is the memory of a worker in blocks of the trace, or of one rank of it. With the real engine it
    includes the states of a hybrid. `model_layout` is the layout of a certain model, or of one of its ranks,
    and needs a grain of 1; then `memory_bytes` replaces `blocks`. A request reaches the router `request_s`
    after its arrival, and `busy_s` later if another one is answered then. The model has `slots` for
    checkpoints in addition. With the real engine a token stands for `grain` tokens of the trace. `hints` are
    those of the trace that are used.

    Each router gets the heartbeats of all workers, `heartbeat_s` after a change at the latest, and
    knows the bookings of the others after `share_s`, or never (None). A request goes to the router
    of its edge, or to that of its prefix family. `compiled` makes the routers fast, and changes no
    choice.
    """

    prefill: int = 8
    decode: int = 8
    mixed: int = 0
    policy: str = OURS
    engine: EngineKind = "real"
    hybrid: bool = False
    eviction: Policy = "value"
    hints: HintKind = "all"
    blocks: int = 2048
    slots: int = 256
    model_layout: Layout | None = None
    memory_bytes: int | None = None
    rows_max: int = ROWS_MAX
    itl_target_s: float = ITL_TARGET_CUDA_S
    request_s: float = 0.0
    busy_s: float = 0.0
    routers: int = 1
    edges: int = 1
    spread: SpreadKind = "edge"
    heartbeat_s: float = LOOK_S
    share_s: float | None = None
    compiled: CompiledPlacement | None = None
    cost: StepCost = field(default_factory=StepCost)
    ttft_s_max: float = NEVER_S
    grain: int = 8
    store_bytes: int = 1 << 40
    seed: int = 1

    @property
    def trace_tokens_per_token(self) -> int:
        return self.grain if self.engine == "real" else 1

    @property
    def layout(self) -> Layout:
        if self.model_layout is not None:
            assert self.grain == 1, "a page of a model has whole tokens"
            return self.model_layout
        return layout_for(hybrid=self.hybrid, grain=self.trace_tokens_per_token)

    def infos(self) -> list[WorkerInfo]:
        layout = self.layout
        counts: dict[Role, int] = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return [
            WorkerInfo(
                worker=WorkerId(f"{role}-{index}.1"),
                name=f"{role}-{index}",
                role=role,
                address=f"{role}-{index}",
                pid=0,
                node="simulated",
                device=f"{role}-{index}",
                page_tokens=layout.page_tokens,
                page_bytes=layout.page_bytes,
                state_bytes=layout.saved_bytes,
                step_tokens_max=self.cost.step_tokens // self.trace_tokens_per_token,
                itl_target_s=self.itl_target_s,
                memory_bytes=self.memory_bytes or self.blocks * layout.page_bytes,
            )
            for role, count in counts.items()
            for index in range(count)
        ]
