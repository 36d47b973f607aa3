"""`tidemill plan`: searches for the cheapest arrangement, prints what it tried, and writes the file."""

import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tidemill.cluster.config.fleets import Surroundings, engine_settings, folders_of
from tidemill.cluster.config.reading import parse_config
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.plan.calibration import Calibration, read_calibration, write_calibration
from tidemill.cluster.plan.cards import CARDS, HERE
from tidemill.cluster.plan.measure import calibrate
from tidemill.cluster.plan.search import Arrangement, Found, Targets, Tried, search
from tidemill.cluster.plan.sizing import NoFit, WorkerSize, bound, predictor, worker_here, worker_on_card
from tidemill.cluster.plan.workload import LeastWork, Load, least_work_of, requests_of
from tidemill.cluster.simulate.trace import TraceRequest
from tidemill.kernels.shared.quantization import Quantization
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.engine.build import with_compute_dtype
from tidemill.workers.models.architectures.registry import ModelSizes, sizes_of
from tidemill.workers.options import LoadFormat
from tidemill.workers.settings import STEP, EngineSettings
from tidemill.workers.sources.download import download

RANKS = (1, 2, 4, 8)
HOST_SHARE = 0.9
"""The part of the memory of this machine that workers may take."""

EXIT_NONE = 1

Serve = Callable[[RootConfig, Callable[[str], Coroutine[Any, Any, None]]], int]
"""Serves a configuration while a function runs that gets the URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of the command. `memory` and `threads` are those of each worker of this machine."""

    model: str
    load_format: LoadFormat
    quantization: Quantization | None
    load: Load
    targets: Targets
    cards: tuple[str, ...]
    cards_max: int
    threads: int
    memory: str
    calibration: Path | None
    output: Path
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """The outcome for one card, or for this machine; `notes` say what does not fit."""

    card: str
    is_estimate: bool
    found: Found
    notes: list[str]
    workers: Mapping[int, WorkerSize]


def plan(
    options: PlanOptions, cores: int, serve: Serve, problems_of: Callable[[RootConfig], Sequence[str]]
) -> int:
    """Run the command: 1 if nothing meets the targets. `problems_of` are those of `tidemill config check`.
    Raises TidemillError."""
    settings = _settings_of(options, Arrangement(options.cards[0], 1, mixed=1))
    dtype = settings.compute_dtype
    assert dtype is not None, "with_compute_dtype has set it"
    model = sizes_of(
        settings.model_folder, dtype, load_format=options.load_format, quantization=options.quantization
    )
    requests = requests_of(options.load, model.vocab_size)
    work = least_work_of(requests)
    plans = [
        _plan_here(options, model, requests, work, cores, serve)
        if card == HERE
        else _plan_card(options, card, model, requests, work)
        for card in options.cards
    ]
    chosen = next((made for made in plans if made.found.chosen is not None), None)
    config = None if chosen is None else _write(options, chosen, problems_of)
    if options.as_json:
        sys.stdout.write(json.dumps(_figures(options, plans, chosen), indent=2) + "\n")
    else:
        Console().print(*[_table(options.targets, made) for made in plans], sep="\n")
        if config is not None:
            Console().print(Text(f"{options.output}: tidemill serve --config {options.output}"))
    return EXIT_NONE if chosen is None else 0


def _plan_here(
    options: PlanOptions,
    model: ModelSizes,
    requests: list[TraceRequest],
    work: LeastWork,
    cores: int,
    serve: Serve,
) -> CardPlan:
    settings = _settings_of(options, Arrangement(HERE, 1, mixed=1))
    calibration = _calibration(options, settings, work, serve)
    worker = worker_here(calibration, model, settings, work)
    may_meet = bound(worker, work, options.targets)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * HOST_SHARE
    worker_bytes = model.weight_bytes + worker.memory_bytes
    most = min(cores // options.threads, int(host_bytes // worker_bytes))
    notes = [f"measured with {options.threads} thread(s) a worker, at a load of {calibration.load:.1f}"]
    if most < cores // options.threads:
        notes.append(f"memory for {most} worker(s) of {worker_bytes / 2**30:.3g} GiB, and cores for more")
    found = search(
        HERE,
        (1,),
        most,
        may_meet=may_meet,
        predict=predictor({1: worker}, requests, options.targets),
        targets=options.targets,
    )
    notes += _floor_notes({1: worker}, work) if not found.tried else []
    return CardPlan(card=HERE, is_estimate=False, found=found, notes=notes, workers={1: worker})


def _plan_card(
    options: PlanOptions, name: str, model: ModelSizes, requests: list[TraceRequest], work: LeastWork
) -> CardPlan:
    workers: dict[int, WorkerSize] = {}
    notes: list[str] = []
    for ranks in RANKS:
        if ranks > options.cards_max:
            continue
        settings = _settings_of(options, Arrangement(name, ranks, mixed=1))
        try:
            workers[ranks] = worker_on_card(CARDS[name], model, settings, work)
        except NoFit as error:
            notes.append(str(error))
    if notes and workers:
        notes = [f"{notes[-1]}: {min(workers)} ranks fit" if min(workers) > 1 else notes[-1]]
    bounds = {ranks: bound(worker, work, options.targets) for ranks, worker in workers.items()}
    found = search(
        name,
        tuple(workers),
        options.cards_max,
        may_meet=lambda arrangement: bounds[arrangement.ranks](arrangement),
        predict=predictor(workers, requests, options.targets),
        targets=options.targets,
    )
    notes += _floor_notes(workers, work) if not found.tried else []
    return CardPlan(card=name, is_estimate=True, found=found, notes=notes, workers=workers)


def _floor_notes(workers: Mapping[int, WorkerSize], work: LeastWork) -> list[str]:
    """Return what one request alone takes, which no number of workers changes."""
    if not workers:
        return []
    worker = workers[max(workers)]
    first_s = worker.request_s + worker.cost.prefill_s(0, max(work.new_tokens))
    next_ms = f"{1000 * worker.cost.decode_s(1):,.1f}"
    note = (
        f"the longest prompt alone takes {1000 * first_s:,.0f} ms to its first token, a stream {next_ms} ms"
    )
    return [f"{note} a token: raise the targets or --max-cards"]


def _calibration(
    options: PlanOptions, settings: EngineSettings, work: LeastWork, serve: Serve
) -> Calibration:
    """Return the calibration of the file, or measure it now and write the file."""
    if options.calibration is not None and options.calibration.exists():
        return read_calibration(options.calibration, options.model, options.threads)
    config = _config(_tree(options, Arrangement(HERE, 1, mixed=1), is_trial=True))
    found: list[Calibration] = []
    prompt_tokens = round(work.mean_prompt)
    step_tokens = settings.max_num_batched_tokens or STEP[0]

    async def measure(url: str) -> None:
        found.append(await calibrate(url, options.model, prompt_tokens, options.threads, step_tokens))

    serve(config, measure)
    if options.calibration is not None:
        write_calibration(options.calibration, found[0])
    return found[0]


def _settings_of(options: PlanOptions, arrangement: Arrangement) -> EngineSettings:
    """Return the settings of a worker. Raises ConfigError, SettingsError, ModelError, SourceError."""
    config = _config(_tree(options, arrangement))
    model = config.models[0]
    folders = folders_of([model], partial(download, offline=True))
    surroundings = Surroundings(store_url="", cache_folder=Path(), folders=folders)
    return with_compute_dtype(engine_settings(config, model, model.groups[0], surroundings))


def _tree(options: PlanOptions, arrangement: Arrangement, *, is_trial: bool = False) -> dict[str, Any]:
    """Return the configuration of an arrangement; that of a trial is served quietly at any port."""
    roles = (
        ("prefill", arrangement.prefill),
        ("decode", arrangement.decode),
        ("mixed", arrangement.mixed),
    )
    own = (
        {"threads": options.threads, "memory": options.memory}
        if arrangement.card == HERE
        else {"device": "cuda", "tensor_parallel_size": arrangement.ranks}
    )
    groups = [{"role": role, "replicas": count, **own} for role, count in roles if count]
    model: dict[str, Any] = {"model": options.model, "groups": groups}
    engine = {"quantization": options.quantization, "load_format": options.load_format}
    model["engine"] = {name: value for name, value in engine.items() if value not in {None, "auto"}}
    quiet = {"edge": {"port": 0}, "telemetry": {"log_level": "warning"}}
    return {"models": [model], **(quiet if is_trial else {})}


def _config(tree: Mapping[str, Any]) -> RootConfig:
    return parse_config(yaml.safe_dump(tree), "")


def _write(
    options: PlanOptions, made: CardPlan, problems_of: Callable[[RootConfig], Sequence[str]]
) -> RootConfig:
    """Write the configuration of the chosen arrangement. Raises TidemillError."""
    tried = made.found.chosen
    assert tried is not None, "a plan without a choice writes nothing"
    tree = _tree(options, tried.arrangement)
    config = _config(tree)
    if problems := problems_of(config):
        raise TidemillError(f"the plan cannot be served here: {problems[0]}")
    kind = f"an estimate for {made.card}" if made.is_estimate else "measured on this machine"
    head = (
        f"# {tried.arrangement}: time to first token {1000 * tried.prediction.ttft_s:.0f} ms, between tokens "
        f"{1000 * tried.prediction.itl_s:.1f} ms at p{options.targets.percentile} ({kind})\n"
    )
    try:
        options.output.write_text(head + yaml.safe_dump(tree, sort_keys=False))
    except OSError as error:
        raise TidemillError(f"--output {options.output}: {error.strerror}") from error
    return config


def _figures(options: PlanOptions, plans: Sequence[CardPlan], chosen: CardPlan | None) -> dict[str, Any]:
    return {
        "targets": asdict(options.targets),
        "output": None if chosen is None else str(options.output),
        "cards": [
            {
                "card": made.card,
                "estimate": made.is_estimate,
                "notes": made.notes,
                "memory_bytes": {ranks: worker.memory_bytes for ranks, worker in made.workers.items()},
                "speed": {ranks: asdict(worker.cost.speed) for ranks, worker in made.workers.items()},
                "tried": [_row(tried) for tried in made.found.tried],
                "chosen": None if made.found.chosen is None else _row(made.found.chosen),
            }
            for made in plans
        ],
    }


def _row(tried: Tried) -> dict[str, Any]:
    return {
        **tried.arrangement._asdict(),
        "cost": tried.arrangement.cost,
        "meets": tried.meets,
        **tried.prediction.figures,
    }


def _table(targets: Targets, made: CardPlan) -> Group:
    """Return the table of a card: what was tried, and what was chosen."""
    unit = "ranks" if made.card == HERE else "cards"
    title = f"{made.card}{' (estimate)' if made.is_estimate else ''}"
    share = f"p{targets.percentile}, ms"
    first, between = f"first token {share}", f"between tokens {share}"
    table = Table("", unit, "GiB a worker", first, between, "", box=None)
    for column in table.columns[1:5]:
        column.justify = "right"
    for tried in made.found.tried:
        arrangement, prediction = tried.arrangement, tried.prediction
        verdict = "chosen" if tried is made.found.chosen else "meets" if tried.meets else "misses"
        table.add_row(
            str(arrangement),
            str(arrangement.cost),
            f"{made.workers[arrangement.ranks].memory_bytes / 2**30:.3g}",
            f"{1000 * prediction.ttft_s:,.0f}",
            f"{1000 * prediction.itl_s:,.1f}",
            f"{verdict}, {prediction.unanswered} unanswered" if prediction.unanswered else verdict,
        )
    missing = [] if made.found.chosen is not None else ["nothing here meets the targets"]
    return Group(Text(title, style="bold"), table, *map(Text, [*missing, *made.notes]))
