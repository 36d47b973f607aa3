"""`tidemill top`: what a fleet does now, from two looks at it: answers by model, work by worker."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.server_address import ServerAddress
from tidemill.cluster.cli.status import STATE_STYLES, ask_text, fetch_status, human_bytes, table
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.scrape import Scraped, scraped
from tidemill.workers.messages import Unserved

BEAT_S_MIN = 0.2
"""Between two heartbeats: what is closer is one."""

MODELS = ("model", "run", "wait", "prompt\ntok/s", "gen\ntok/s", "TTFT", "p95", "ITL", "p95", "hits")
WORKERS = ("worker", "role", "run", "wait", "queue", "prompt\ntok/s", "gen\ntok/s", "pages", "states", "used")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One look: the answer of GET /cluster, and /metrics, at a time of a monotonic clock."""

    at_s: float
    status: Mapping[str, Any]
    metrics: Scraped


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """Answers of one model, of this frontend. Times and the share of cached prompt tokens are of what came
    between the looks; None when nothing did."""

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
    """Rates are those between heartbeats; None for a life that was not there before. Bytes are those that
    running requests hold, `used_share` is their share of the budget."""

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


def take(server: ServerAddress, at_s: float) -> Snapshot:
    """Raises Unserved or RequestError, as `fetch_status` does."""
    status = fetch_status(server)
    try:
        metrics = scraped(ask_text(server, "/metrics"))
    except ValueError as error:
        raise Unserved(f"{server.url}/metrics is no text of Prometheus ({error}): check --url") from error
    return Snapshot(at_s=at_s, status=status, metrics=metrics)


def rows(before: Snapshot, after: Snapshot) -> TopRows:
    """Models in the order of the server, workers by what they have to do, the busiest first."""
    lives = {one["info"]["worker"]: one for one in before.status["workers"]}
    passed_s = after.at_s - before.at_s
    workers = [_worker(lives.get(one["info"]["worker"]), one, passed_s) for one in after.status["workers"]]
    workers.sort(
        key=lambda one: (-one.running - one.waiting, -one.queued_tokens, -one.used_share, one.worker)
    )
    models = (_model(one["id"], before.metrics, after.metrics, passed_s) for one in after.status["models"])
    return TopRows(seconds=passed_s, models=tuple(models), workers=tuple(workers))


def render_top(found: TopRows) -> RenderableType:
    """Fits 80 columns."""
    models = table(MODELS, num_left=1)
    for one in found.models:
        times = (one.ttft_s, one.ttft_p95_s, one.itl_s, one.itl_p95_s)
        models.add_row(
            Text(one.model),  # as Text: no markup
            *map(_count, (one.running, one.waiting)),
            *map(_rate, (one.prompt_tokens_per_s, one.generated_tokens_per_s)),
            *map(_time, times),
            _share(one.hit_share),
        )
    if not found.workers:
        return Group(models, "", Text("no worker is alive", style="red"))
    workers = table(WORKERS, num_left=2)
    for one in found.workers:
        style = STATE_STYLES.get(one.state, "")
        workers.add_row(
            Text(one.worker),
            Text(one.role if one.state == "ready" else one.state, style=style),
            *map(_count, (one.running, one.waiting, one.queued_tokens)),
            *map(_rate, (one.prompt_tokens_per_s, one.generated_tokens_per_s)),
            *map(human_bytes, (one.pages_bytes, one.states_bytes)),
            _share(one.used_share),
        )
    return Group(models, "", workers)


def _model(name: str, before: Scraped, after: Scraped, passed_s: float) -> ModelRow:
    def rate(spec: specs.Spec) -> float:
        return _grown(before.value(spec, name), after.value(spec, name)) / passed_s

    ttft = after.seen(specs.TTFT, name).since(before.seen(specs.TTFT, name))
    itl = after.seen(specs.ITL, name).since(before.seen(specs.ITL, name))
    asked = rate(specs.QUERIES)
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
        hit_share=rate(specs.HITS) / asked if asked else None,
    )


def _worker(before: Mapping[str, Any] | None, after: Mapping[str, Any], passed_s: float) -> WorkerRow:
    info, load = after["info"], after["load"]
    memory = load["memory"]

    def rate(counter: str) -> float | None:
        if before is None:
            return None
        # counters are those of the last heartbeat
        beat_s = passed_s + before["heard_ago_s"] - after["heard_ago_s"]
        grown = load["counters"].get(counter, 0) - before["load"]["counters"].get(counter, 0)
        return grown / beat_s if beat_s > BEAT_S_MIN else None

    held_bytes = memory["pages_live"] + memory["states_live"] + memory["windows_live"]
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
        used_share=held_bytes / load["budget_bytes"] if load["budget_bytes"] else 0.0,
    )


def _grown(before: float, after: float) -> float:
    """A counter that fell has begun anew."""
    return after - before if after >= before else after


def _rate(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.1f}" if 0 < number < 9.95 else _count(round(number))


def _count(number: int) -> str:
    """In five characters: `9,999`, `99.9k`, `1.23M`."""
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
