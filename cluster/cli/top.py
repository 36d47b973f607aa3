"""`tidemill top`: show the current load of models and workers, from the difference of two snapshots; and
polling a server until Ctrl-C, also while it is away."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.status import STATE_STYLES, ask_text, fetch_status, human_bytes, table
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.scrape import Scraped, scraped
from tidemill.workers.messages import Unserved

_View = TypeVar("_View")

OUTDATED = "The view below is outdated."

BEAT_S_MIN = 0.2
"""The minimum time between two heartbeats; snapshots with a shorter one have the same heartbeat."""

MODELS = ("model", "run", "wait", "prompt\ntok/s", "gen\ntok/s", "TTFT", "p95", "ITL", "p95", "hits")
WORKERS = ("worker", "role", "run", "wait", "queue", "prompt\ntok/s", "gen\ntok/s", "pages", "states", "used")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The answers of GET /cluster and /metrics, at a time of a monotonic clock."""

    at_s: float
    status: Mapping[str, Any]
    metrics: Scraped


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """The load of one model at this edge. Times and the share of cached prompt tokens are of the requests
    between the snapshots, None without any."""

    model: str
    running: int
    waiting: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    ttft_s: float | None
    ttft_p95_s: float | None
    itl_s: float | None
    itl_p95_s: float | None
    hit_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """The load of one worker. Rates are measured between heartbeats; None if the worker has restarted since
    the first snapshot. Bytes are those of running requests, `used_share` is their share of the budget."""

    model: str
    worker: str
    role: str
    state: str
    running: int
    waiting: int
    queued_tokens: int
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    pages_bytes: int
    states_bytes: int
    used_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRows:
    seconds: float
    models: tuple[ModelRow, ...]
    workers: tuple[WorkerRow, ...]

    def json(self) -> dict[str, Any]:
        return asdict(self)


def take_snapshot(server: ServerAddress, at_s: float) -> Snapshot:
    """Fetch status and metrics. Raises Unserved or RequestError like `fetch_status`."""
    status = fetch_status(server)
    try:
        metrics = scraped(ask_text(server, "/metrics"))
    except ValueError as error:
        raise Unserved(
            f"{server.url}/metrics is not in Prometheus text format ({error}): check --url"
        ) from error
    return Snapshot(at_s=at_s, status=status, metrics=metrics)


def compare(before: Snapshot, after: Snapshot) -> TopRows:
    """Return the rates between two snapshots: models in the server's order, the busiest workers first."""
    earlier = {worker["info"]["worker"]: worker for worker in before.status["workers"]}
    elapsed_s = after.at_s - before.at_s
    workers = [
        _worker(earlier.get(worker["info"]["worker"]), worker, elapsed_s)
        for worker in after.status["workers"]
    ]
    workers.sort(
        key=lambda row: (-row.running - row.waiting, -row.queued_tokens, -row.used_share, row.worker)
    )
    models = (
        _model(model["id"], before.metrics, after.metrics, elapsed_s) for model in after.status["models"]
    )
    return TopRows(seconds=elapsed_s, models=tuple(models), workers=tuple(workers))


def render_top(rows: TopRows) -> RenderableType:
    """Render the rows within 80 columns."""
    models = table(MODELS, num_left=1)
    for model in rows.models:
        times = (model.ttft_s, model.ttft_p95_s, model.itl_s, model.itl_p95_s)
        models.add_row(
            Text(model.model),  # Text has no markup
            *map(_count, (model.running, model.waiting)),
            *map(_rate, (model.prompt_tokens_per_s, model.generated_tokens_per_s)),
            *map(_time, times),
            _share(model.hit_share),
        )
    if not rows.workers:
        return Group(models, "", Text("no worker is alive", style="red"))
    workers = table(WORKERS, num_left=2)
    for worker in rows.workers:
        style = STATE_STYLES.get(worker.state, "")
        workers.add_row(
            Text(worker.worker),
            Text(worker.role if worker.state == "ready" else worker.state, style=style),
            *map(_count, (worker.running, worker.waiting, worker.queued_tokens)),
            *map(_rate, (worker.prompt_tokens_per_s, worker.generated_tokens_per_s)),
            *map(human_bytes, (worker.pages_bytes, worker.states_bytes)),
            _share(worker.used_share),
        )
    return Group(models, "", workers)


def _model(name: str, before: Scraped, after: Scraped, elapsed_s: float) -> ModelRow:
    def rate(spec: specs.Spec) -> float:
        return _increase(before.value(spec, name), after.value(spec, name)) / elapsed_s

    ttft = after.seen(specs.TTFT, name).since(before.seen(specs.TTFT, name))
    itl = after.seen(specs.ITL, name).since(before.seen(specs.ITL, name))
    queries_per_s = rate(specs.QUERIES)
    return ModelRow(
        model=name,
        running=int(after.value(specs.RUNNING, name)),
        waiting=int(after.value(specs.WAITING, name)),
        prompt_tokens_per_s=rate(specs.PROMPT_TOKENS),
        generated_tokens_per_s=rate(specs.GENERATION_TOKENS),
        ttft_s=ttft.mean(),
        ttft_p95_s=ttft.quantile(0.95),
        itl_s=itl.mean(),
        itl_p95_s=itl.quantile(0.95),
        hit_share=rate(specs.HITS) / queries_per_s if queries_per_s else None,
    )


def _worker(before: Mapping[str, Any] | None, after: Mapping[str, Any], elapsed_s: float) -> WorkerRow:
    info, load = after["info"], after["load"]
    memory = load["memory"]

    def rate(counter: str) -> float | None:
        if before is None:
            return None
        # Counters are those of the last heartbeat.
        beat_s = elapsed_s + before["heard_ago_s"] - after["heard_ago_s"]
        increase = load["counters"].get(counter, 0) - before["load"]["counters"].get(counter, 0)
        return increase / beat_s if beat_s > BEAT_S_MIN else None

    live_bytes = sum(num_bytes for name, num_bytes in memory.items() if name.endswith("_live"))
    return WorkerRow(
        model=after["model"],
        worker=info["name"],
        role=info["role"],
        state=after["state"],
        running=load["running_rows"],
        waiting=load["waiting_rows"],
        queued_tokens=load["queued_tokens"],
        prompt_tokens_per_s=rate("computed_tokens"),
        generated_tokens_per_s=rate("generated_tokens"),
        pages_bytes=memory["pages_live"],
        states_bytes=memory["states_live"],
        used_share=live_bytes / load["budget_bytes"] if load["budget_bytes"] else 0.0,
    )


def _increase(before: float, after: float) -> float:
    """Return the increase of a counter; a counter that fell has been reset to 0."""
    return after - before if after >= before else after


def _rate(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.1f}" if 0 < number < 9.95 else _count(round(number))


def _count(number: int) -> str:
    """Return the number in at most five characters: `9,999`, `99.9k`, `1.23M`."""
    if number < 10_000:
        return f"{number:,}"
    if number < 1_000_000:
        return f"{number / 1000:.1f}k" if number < 99_950 else f"{number // 1000}k"
    return f"{number / 1e6:.2f}M"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1000:.0f} ms"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def poll(fetch: Callable[[], _View], pause: Callable[[], None]) -> Iterator[_View | Unserved]:
    """Yield views, or the error while the server is away, with a pause after each. RequestError ends the
    iteration, for a wrong key stays wrong."""
    while True:
        view: _View | Unserved
        try:
            view = fetch()
        except Unserved as error:
            view = error
        yield view
        pause()


def show_live(
    views: Iterable[_View | Unserved], draw: Callable[[_View], RenderableType], console: Console
) -> None:
    """Show each view until Ctrl-C or SIGTERM: on a terminal in its own screen, elsewhere one after
    another."""
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as screen,
    ):
        for rendered in _render(views, draw):
            if console.is_terminal:
                screen.update(rendered, refresh=True)
            else:
                console.print(rendered)


def _render(
    views: Iterable[_View | Unserved], draw: Callable[[_View], RenderableType]
) -> Iterator[RenderableType]:
    """Draw each view; while the server is away, draw the error above the last view."""
    last: RenderableType | None = None
    for view in views:
        if not isinstance(view, Unserved):
            last = draw(view)
            yield last
            continue
        problem = Text(f"{view}. Trying again.", style="red")
        yield problem if last is None else Group(problem, Text(OUTDATED, style="red"), "", last)
