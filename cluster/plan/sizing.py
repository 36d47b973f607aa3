"""The memory and the speed of a worker of a plan, and the simulation of several."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tidemill.cluster.plan.calibration import Calibration
from tidemill.cluster.plan.cards import (
    GRAPH_BYTES,
    REQUEST_S,
    STEP_BYTES,
    Card,
    roofline,
)
from tidemill.cluster.plan.search import Arrangement, Prediction, Targets
from tidemill.cluster.plan.workload import LeastWork
from tidemill.cluster.simulate.cost import StepCost
from tidemill.cluster.simulate.report import percentile
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.trace import TraceRequest
from tidemill.cluster.simulate.world import simulate
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.layout import Layout, layout_of
from tidemill.kvstore.shards import rank_layers
from tidemill.workers.engine.memory_plan import DeviceMemory, arena_bytes, budget_of, extents_for, memory_of
from tidemill.workers.models.architectures.registry import ModelSizes
from tidemill.workers.settings import EngineSettings

STORE_BYTES = 1 << 40
HOST_STORE_BYTES_PER_S = 1e9
"""The rate of a store in the memory of this machine, if no worker has measured it."""


class NoFit(TidemillError):
    """A worker of this size does not hold the model and the longest request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """A worker: its settings, the layout and the memory of one rank, and its speed. `request_s` is the time
    of a request outside of steps, `busy_s` what it takes more beside others; `is_estimate` where no worker
    has measured it."""

    settings: EngineSettings
    layout: Layout
    arena_bytes: int
    cost: StepCost
    request_s: float
    is_estimate: bool
    busy_s: float = 0.0

    @property
    def memory_bytes(self) -> int:
        """The memory for pages and states, of all ranks together."""
        return self.arena_bytes * self.settings.tensor_parallel_size


def worker_on_card(card: Card, model: ModelSizes, settings: EngineSettings, work: LeastWork) -> WorkerSize:
    """Return a worker on cards that no worker has measured. Raises NoFit, with one line about what takes
    the memory."""
    ranks = settings.tensor_parallel_size
    layout, need = _need(model, settings, work)
    weights = model.weight_bytes // ranks
    taken = weights + STEP_BYTES + GRAPH_BYTES
    device = DeviceMemory(
        name=card.name,
        total=card.memory_bytes,
        free=card.memory_bytes - taken,
        weights=weights,
        steps=STEP_BYTES,
        graphs=GRAPH_BYTES,
    )
    try:
        arena = arena_bytes(settings, device, need)
    except TidemillError as error:
        granted = int(card.memory_bytes * settings.gpu_memory_utilization)
        raise NoFit(
            f"{ranks} x {card.name}: a rank needs {_gib(taken + need)} for weights, steps and the longest "
            f"request, and has {_gib(granted)}"
        ) from error
    speed = roofline(card, model, layout, ranks, work.mean_context)
    tokens = budget_of(settings, layout.page_tokens).tokens_max
    return WorkerSize(
        settings=settings,
        layout=layout,
        arena_bytes=arena,
        cost=StepCost(speed=speed, step_tokens=tokens),
        request_s=REQUEST_S,
        is_estimate=True,
    )


def worker_here(
    calibration: Calibration, model: ModelSizes, settings: EngineSettings, work: LeastWork
) -> WorkerSize:
    """Return a worker of this machine, as it was measured. Raises NoFit, which names the memory that the
    longest request needs."""
    layout, need = _need(model, settings, work)
    arena = memory_of(settings, model.layers, model.max_length).share * layout.extent_bytes
    if arena < need:
        raise NoFit(f"the longest request needs --memory {-(-need >> 20)}MiB, and a worker has {_gib(arena)}")
    speed = replace(calibration.speed, fetch_bytes_per_s=HOST_STORE_BYTES_PER_S)
    return WorkerSize(
        settings=settings,
        layout=layout,
        arena_bytes=arena,
        cost=StepCost(speed=speed, step_tokens=budget_of(settings, layout.page_tokens).tokens_max),
        request_s=calibration.request_s,
        busy_s=calibration.busy_s,
        is_estimate=False,
    )


def _need(model: ModelSizes, settings: EngineSettings, work: LeastWork) -> tuple[Layout, int]:
    """Return the layout of a rank, and its bytes for the longest request. Raises NoFit."""
    if work.longest > model.max_length:
        raise NoFit(
            f"the longest request has {work.longest:,} tokens, and the model takes {model.max_length:,}: "
            "give shorter ones"
        )
    try:
        layers = rank_layers(model.layers, settings.tensor_parallel_size)
        forms = settings.page_dtype, settings.state_dtype, settings.saved_dtype, settings.page_slices
        layout = layout_of(layers, settings.page_size, *forms)
    except ValueError as error:
        raise NoFit(str(error)) from error
    return layout, extents_for(layout, work.longest) * layout.extent_bytes


def bound(worker: WorkerSize, work: LeastWork, targets: Targets) -> Callable[[Arrangement], bool]:
    """Return a function that is False for arrangements of this worker that cannot meet the targets, because
    one prompt alone, one stream alone, or the prompts of all requests together take too long."""
    cost, speed = worker.cost, worker.cost.speed
    alone_s = sorted(worker.request_s + cost.prefill_s(0, tokens) for tokens in work.new_tokens)
    late = targets.ttft_s is not None and percentile(alone_s, targets.percentile) > targets.ttft_s
    slow = targets.itl_s is not None and speed.step_s + speed.row_s > targets.itl_s
    counted = sorted(work.new_tokens)[: len(work.new_tokens) * targets.percentile // 100]
    work_s = sum(tokens * speed.token_s for tokens in counted)

    def may_meet(arrangement: Arrangement) -> bool:
        if late or slow:
            return False
        if targets.ttft_s is None:
            return True
        computing = arrangement.mixed or arrangement.workers  # a decode worker may compute prompts, too
        return work_s <= computing * (work.span_s + targets.ttft_s)

    return may_meet


def predictor(
    workers: Mapping[int, WorkerSize], requests: list[TraceRequest], targets: Targets
) -> Callable[[Arrangement], Prediction]:
    """Return a function that simulates the requests on an arrangement; `workers` are by the number of
    ranks."""

    def predict(arrangement: Arrangement) -> Prediction:
        worker = workers[arrangement.ranks]
        setup = Setup(
            prefill=arrangement.prefill,
            decode=arrangement.decode,
            mixed=arrangement.mixed,
            model_layout=worker.layout,
            memory_bytes=worker.arena_bytes,
            rows_max=budget_of(worker.settings, worker.layout.page_tokens).rows_max,
            itl_target_s=worker.settings.step_target_s,
            request_s=worker.request_s,
            busy_s=worker.busy_s,
            cost=worker.cost,
            grain=1,
            store_bytes=STORE_BYTES,
        )
        outcome = simulate(requests, setup)
        first_s = sorted(request.ttft_s for request in outcome.served)
        return Prediction(
            ttft_s=percentile(first_s, targets.percentile),
            itl_s=percentile(sorted(outcome.gaps_s), targets.percentile),
            unanswered=outcome.refused + outcome.failed,
            figures=outcome.figures(),
        )

    return predict


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
