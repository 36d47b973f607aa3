"""`tidemill bench`: builds a workload, sends it, and prints a table or JSON, and draws a plot."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidemill.cluster.bench.client import LoadClient, RequestResult
from tidemill.cluster.bench.files import ShareGptFile, TraceFile, sharegpt, trace
from tidemill.cluster.bench.load import run_load, timed
from tidemill.cluster.bench.plot import plot
from tidemill.cluster.bench.report import BenchRun, figures_of, summary
from tidemill.cluster.bench.workloads import Shape, Workload, generated
from tidemill.cluster.simulate.plot import new_figure
from tidemill.kvstore.errors import TidemillError

TIMEOUT_S = 600.0
CONNECT_S = 30.0
VOCAB_SIZE = 8192
"""Token ids below it exist in the vocabulary of every common model."""

EXIT_NOT_ALL = 1


class NoAnswer(TidemillError):
    """The server does not list what it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of the command. `source` is the shape of a generated workload, or the file of requests;
    `fields` are in each body."""

    url: str
    api_key: str
    verify: bool
    endpoint: str
    model: str | None
    vocab_size: int | None
    source: Shape | ShareGptFile | TraceFile
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    self_timed: bool | None
    num_warmups: int
    seed: int
    fields: Mapping[str, object]
    hints: bool
    goodput_ms: Mapping[str, float]
    percentiles: tuple[float, ...]
    shows_progress: bool
    as_json: bool
    result_file: Path | None
    plot: Path | None


def bench(options: BenchOptions, clock_s: Callable[[], float]) -> int:
    """Run the command; return 1 if a request failed. Raises TidemillError."""
    figure = None if options.plot is None else new_figure()
    run = asyncio.run(measure(options, clock_s))
    figures = figures_of(run)
    if options.as_json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        Console().print(summary(figures, run))
    if options.result_file is not None:
        _write(options.result_file, figures, run)
    if options.plot is not None:
        plot(run, figure, options.plot)
    return EXIT_NOT_ALL if figures["failed"] else 0


async def measure(options: BenchOptions, clock_s: Callable[[], float]) -> BenchRun:
    """Send the workload of the options. Raises NoAnswer, BadWorkload, TraceError."""
    async with open_http(options.url, options.api_key, verify=options.verify) as http:
        model, vocab_size = await find_model(http, options.model, options.vocab_size)
        workload = workload_of(options, vocab_size)
        client = LoadClient(
            http=http,
            clock_s=clock_s,
            model=model,
            endpoint=options.endpoint,
            fields=options.fields,
            hints=options.hints,
        )
        warm = Workload("warm", workload.items[: options.num_warmups])
        await run_load(client, timed(warm, Random(options.seed)))  # noqa: S311  a seeded workload
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]} failed"),
            console=Console(stderr=True),
            disable=not options.shows_progress,
        )
        with progress:
            bar = progress.add_task(workload.name, total=len(workload.items), failed=0)
            failed = 0

            def on_answer(result: RequestResult) -> None:
                nonlocal failed
                failed += bool(result.error)
                progress.update(bar, advance=1, failed=failed)

            start_s = clock_s()
            results = await run_load(client, workload, options.max_concurrency, on_answer)
            wall_s = clock_s() - start_s
    return BenchRun(
        results=tuple(results),
        wall_s=wall_s,
        setup={
            "dataset_name": workload.name,
            "model_id": model,
            "endpoint": options.endpoint,
            "num_prompts": len(workload.items),
            "request_rate": "inf" if options.request_rate == inf else options.request_rate,
            "burstiness": "inf" if options.burstiness == inf else options.burstiness,
            "max_concurrency": options.max_concurrency,
            "seed": options.seed,
        },
        percentiles=options.percentiles,
        goodput_ms=options.goodput_ms,
    )


def open_http(url: str, api_key: str = "", *, verify: bool = True) -> httpx.AsyncClient:
    """Return a client of a server, with a connection for each request that is open."""
    return httpx.AsyncClient(
        base_url=url.removesuffix("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        verify=verify,
        trust_env=False,
    )


async def find_model(
    http: httpx.AsyncClient, name: str | None = None, vocab_size: int | None = None
) -> tuple[str, int]:
    """Return the name of the model (the first that is served) and its vocabulary size. Raises NoAnswer."""
    if name is not None and vocab_size is not None:
        return name, vocab_size
    try:
        response = (await http.get("/v1/models")).raise_for_status()
        entries: list[dict[str, Any]] = response.json()["data"]
        entry = next(entry for entry in entries if name in {None, entry["id"]})
    except (httpx.HTTPError, ValueError, KeyError, TypeError, StopIteration) as error:
        if name is not None:
            return name, VOCAB_SIZE
        raise NoAnswer(
            f"{http.base_url.join('/v1/models')} does not list a model ({error or type(error).__name__}): "
            "give the server with --base-url, its key with --api-key, and the model with --model"
        ) from error
    return entry["id"], vocab_size or entry.get("vocab_size") or VOCAB_SIZE


def workload_of(options: BenchOptions, vocab_size: int) -> Workload:
    """Return the requests and their arrival times. Raises BadWorkload, TraceError."""
    rng = Random(options.seed)  # noqa: S311  a seeded workload
    match options.source:
        case ShareGptFile() as source:
            workload = sharegpt(source, rng)
        case TraceFile() as source:
            workload = trace(source, vocab_size, options.seed)
        case shape:
            workload = generated(rng, vocab_size, shape)
    return timed(
        workload,
        rng,
        rate=options.request_rate,
        burstiness=options.burstiness,
        self_timed=workload.is_timed if options.self_timed is None else options.self_timed,
    )


def _write(path: Path, figures: dict[str, Any], run: BenchRun) -> None:
    """Write the figures, and of each request its times, tokens and error. Raises TidemillError."""
    rows = [
        {
            "group": result.item.group,
            "position": result.item.position,
            **{name: value for name, value in asdict(result).items() if name != "item"},
        }
        for result in run.results
    ]
    try:
        path.write_text(json.dumps({**figures, "requests": rows}, indent=1) + "\n")
    except OSError as error:
        raise TidemillError(f"--result-filename {path}: {error.strerror}") from error
