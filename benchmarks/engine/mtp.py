"""Compare a prediction head (MTP) with n-grams and with no guesses: keeper with the head of
tools/train_keeper/head.py.

    python -m benchmarks.engine.mtp [--turns N]

Prompts are from the keeper's world, which it continues. All variants alternate in one process with one
thread. Times are CPU times of the process, and the median turn of each variant counts. Answers must be equal.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median_low
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tools.train_keeper.head import keeper_with_head
from tools.train_keeper.stream import Mix, Writer, batch

from benchmarks.engine.run import Load, Run, measure
from tidemill.workers.settings import EngineSettings

RESULTS = Path(__file__).parents[1] / "results" / "mtp.json"
PROMPT_TOKENS, NEW_TOKENS = 200, 384
SEED = 77
BATCHES = (1, 8)
WAYS: dict[str, dict[str, Any]] = {
    "no guesses": {},
    "ngram, 4": {"drafts_max": 4, "speculative_method": "ngram"},
    "mtp, 1": {"drafts_max": 1, "speculative_method": "mtp"},
    "mtp, 2": {"drafts_max": 2, "speculative_method": "mtp"},
    "mtp, 4": {"drafts_max": 4, "speculative_method": "mtp"},
}

Row = dict[str, Any]


def a_load(folder: Path, count: int, temperature: float) -> Load:
    writer = Writer(cast("Any", Tokenizer).from_file(str(folder / "tokenizer.json")))
    ids = batch(writer, Random(SEED), Mix(), (count, PROMPT_TOKENS), 0.3).ids
    return Load(prompts=ids.numpy().tolist(), new_tokens=NEW_TOKENS, temperature=temperature)


def rows_of(settings: EngineSettings, turns: int) -> list[Row]:
    rows: list[Row] = []
    for temperature in (0.0, 1.0):
        for count in BATCHES:
            load = a_load(settings.model_folder, count, temperature)
            runs: dict[str, list[Run]] = {name: [] for name in WAYS}
            for _ in range(turns):
                for name, changes in WAYS.items():
                    runs[name].append(measure(replace(settings, **changes), load))
            assert len({str(run.tokens) for some in runs.values() for run in some}) == 1, "an answer changed"
            plain = median_low(run.cpu_ms_per_token for run in runs["no guesses"])
            for name, some in runs.items():
                cpu_ms = median_low(run.cpu_ms_per_token for run in some)
                rows.append(
                    {
                        "temperature": temperature,
                        "streams": count,
                        "guesses": name,
                        "tokens per CPU second": 1e3 / cpu_ms,
                        "ratio": plain / cpu_ms,
                        "tokens per trial": some[0].accepted_length or "",
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = EngineSettings(
            model_folder=keeper_with_head(Path(scratch) / "keeper"),
            memory_bytes=256 << 20,
            store_url="memory:?size=0",
            cache_folder=Path(scratch) / "kernels",
            overlap=False,
        )
        rows = rows_of(settings, given.turns)
    table = Table()
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
