"""The engine alone, without Ray and HTTP: against transformers, its bookkeeping, its features on and off.

    python -m benchmarks.engine.engine [--quick] [--only peers bookkeeping features flood groups]

What is compared runs turn by turn in one process with the same number of threads; a ratio is that of the run
of median speed on either side. CPU time is that of the whole process, for groups of all ranks.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median_low
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.engine.run import Load, Run, generate, measure, model_folder
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled

RESULTS = Path(__file__).parents[1] / "results" / "engine.json"
THREADS = 1
PROMPT_TOKENS, NEW_TOKENS = 64, 128
FIRST_TOKEN, VOCABULARY = 3, 800

MODELS = ("keeper", "hybrid-77m")
BATCHES = (1, 8, 32)

Row = dict[str, Any]


def a_load(batch: int, *, new_tokens: int, seed: int = 0, temperature: float = 0.0) -> Load:
    rng = Random(seed)
    prompts = [[rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    return Load(prompts=prompts, new_tokens=new_tokens, temperature=temperature)


def peers(settings: EngineSettings, turns: int) -> list[Row]:
    """The same prompts, greedy, to the same length."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            folder = model_folder(name, Path(scratch))
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for batch in BATCHES:
                load = a_load(batch, new_tokens=NEW_TOKENS if name == "keeper" else NEW_TOKENS // 4)
                ours, theirs = _turn_by_turn(
                    turns,
                    lambda load=load, folder=folder: measure(replace(settings, model_folder=folder), load),
                    lambda load=load, model=model: generate(model, load),
                )
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "tokens/s": ours.tokens_per_s,
                        "transformers": theirs.tokens_per_s,
                        "ratio": ours.tokens_per_s / theirs.tokens_per_s,
                        "CPU ms/token": ours.cpu_ms_per_token,
                        "transformers CPU": theirs.cpu_ms_per_token,
                        "CPU ratio": theirs.cpu_ms_per_token / ours.cpu_ms_per_token,
                    }
                )
    return rows


def bookkeeping(settings: EngineSettings, turns: int) -> list[Row]:
    """CPU time of a step: planning with memory, landing, the model, and the rest of the loop (streams)."""
    rows: list[Row] = []
    for batch in (32, 256):
        load = a_load(batch, new_tokens=NEW_TOKENS)
        run = _median_run(
            [measure(replace(settings, rows_max=batch), load, watch=True) for _ in range(turns)]
        )
        own = run.parts_ms["schedule"] + run.parts_ms["land"]
        rows.append(
            {
                "batch": batch,
                "schedule ms": run.parts_ms["schedule"],
                "land ms": run.parts_ms["land"],
                "model ms": run.parts_ms["model"],
                "share": own / (own + run.parts_ms["model"]),
                "streams ms": run.parts_ms["loop"] - own,
            }
        )
    return rows


def features(settings: EngineSettings, turns: int) -> list[Row]:
    """Tokens per second and CPU time with a feature, over those without it."""
    rows: list[Row] = []
    guesses = replace(settings, drafts_max=4)
    for name, on, off, temperature in (
        ("overlap", settings, replace(settings, overlap=False), 0.0),
        ("speculation, repetitive text", guesses, settings, 0.0),
        ("speculation, sampled text", guesses, settings, 1.0),
    ):
        for batch in BATCHES:
            load = a_load(batch, new_tokens=NEW_TOKENS, temperature=temperature)
            with_it, without = _turn_by_turn(
                turns,
                lambda on=on, load=load: measure(on, load),
                lambda off=off, load=load: measure(off, load),
            )
            assert with_it.tokens == without.tokens, "a feature changed an answer"
            rows.append(
                {
                    "feature": name,
                    "batch": batch,
                    "speed ratio": with_it.tokens_per_s / without.tokens_per_s,
                    "CPU ratio": without.cpu_ms_per_token / with_it.cpu_ms_per_token,
                    "tokens per trial": with_it.accepted_length or "",
                }
            )
    return rows


def flood(settings: EngineSettings, turns: int) -> list[Row]:
    """Time between the tokens of running streams, alone and while long prompts keep coming."""
    rows: list[Row] = []
    for streams in BATCHES:
        load = a_load(streams, new_tokens=4 * NEW_TOKENS, temperature=1.0)
        flooded, alone = _turn_by_turn(
            turns,
            lambda load=load: measure(settings, load, flood_tokens=2048),
            lambda load=load: measure(settings, load),
        )
        rows.append(
            {
                "streams": streams,
                "ITL ms alone": alone.itl_ms_mean,
                "flooded": flooded.itl_ms_mean,
                "ratio": flooded.itl_ms_mean / alone.itl_ms_mean,
                "p99 ratio": flooded.itl_ms_p99 / alone.itl_ms_p99,
                "prompt tokens/s beside": flooded.flood_tokens_per_s,
            }
        )
    return rows


def groups(settings: EngineSettings, turns: int) -> list[Row]:
    """A group of two ranks against one process, each rank with one thread."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            folder = model_folder(name, Path(scratch))
            for batch in BATCHES:
                load = a_load(batch, new_tokens=NEW_TOKENS // 4)
                single_rank = replace(settings, model_folder=folder)
                two_ranks = replace(single_rank, tensor_parallel_size=2)
                pair, single = _turn_by_turn(
                    turns,
                    lambda ranks=two_ranks, load=load: measure(ranks, load),
                    lambda rank=single_rank, load=load: measure(rank, load),
                )
                assert pair.tokens == single.tokens, "two ranks gave another answer than one"
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "speed ratio": pair.tokens_per_s / single.tokens_per_s,
                        "CPU ratio": single.cpu_ms_per_token / pair.cpu_ms_per_token,
                    }
                )
    return rows


def _turn_by_turn(turns: int, first: Callable[[], Run], second: Callable[[], Run]) -> tuple[Run, Run]:
    """The run of each whose speed is the median; both warm up once."""
    first(), second()
    pairs = [(first(), second()) for _ in range(turns)]
    return _median_run([pair for pair, _ in pairs]), _median_run([other for _, other in pairs])


def _median_run(runs: Sequence[Run]) -> Run:
    middle = median_low([run.tokens_per_s for run in runs])
    return next(run for run in runs if run.tokens_per_s == middle)


PARTS: dict[str, Callable[[EngineSettings, int], list[Row]]] = {
    "peers": peers,
    "bookkeeping": bookkeeping,
    "features": features,
    "flood": flood,
    "groups": groups,
}


def show(title: str, rows: Sequence[Row]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(
            *(f"{value:,.3g}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one turn of each: rough figures")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "tidemill")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    settings = EngineSettings(
        model_folder=bundled()["keeper"],
        memory_bytes=1 << 30,
        store_url="memory:?size=0",
        cache_folder=args.cache_dir,
        threads=THREADS,
    )
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in args.only:
        rows = PARTS[part](settings, 1 if args.quick else 3)
        show((PARTS[part].__doc__ or part).splitlines()[0], rows)
        found[part] = rows
    if not args.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
