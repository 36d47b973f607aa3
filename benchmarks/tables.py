"""Fill the tables of pages from the files of benchmarks/results.

python -m benchmarks.tables

A page marks a table by a line `<!-- table: NAME -->`. What follows up to `<!-- end -->` is replaced.
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.peers.cases import CASES, ONE_THREAD, Case
from benchmarks.peers.works import METRICS, shown
from benchmarks.rows import RESULTS, Row, read_rows
from tidemill.cluster.plan.cards import CARDS, STEP_BYTES

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / page for page in ("benchmarks/README.md", "docs/side_by_side.md", "docs/sizing.md", "docs/vllm.md")
)
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
WIDTH = 100

WORKS = {
    "c=1": "1 stream of 128 + 64 tokens",
    "c=8": "8 streams",
    "c=32": "32 streams",
    "c=128": "128 streams",
    "first token of 2,048": "first token of 2,048",
    "four prompts of 8,000": "four prompts of 8,000",
    "four conversations": "4 conversations of six turns",
    "4 x 4 x (2,400 + 128), c=4": "4 families of 4 that share 2,400, four at a time",
    "8 x 8 x (1,024 + 128), c=8": "8 families of 8 that share 1,024, eight at a time",
}
"""The works of `benchmarks.peers` that pages show, and what they are."""

MORE_WORKS = {
    "decode, 1 stream": "a token of 1 stream",
    "4 x 4 x (512 + 128), c=4": "4 families of 4 that share 512, four at a time",
    "4 x 4 x (1,400 + 128), c=4": "4 families of 4 that share 1,400, four at a time",
}
"""The works of `CASES` alone."""

STORED = {
    "int8": "INT8 in rows (compressed-tensors)",
    "int4": "INT4 in groups of 128 (compressed-tensors)",
    "Q4_1": "Q4_1 (GGUF)",
    "Q8_0": "Q8_0 (GGUF)",
}
"""The weights of a model whose name has this ending; those of others are in bfloat16."""

GOALS = {
    "hybrid": (0.60, 0.65, 0.65, 0.75, 0.65, 0.70, 0.45, 0.70, 0.33),
    "dense": (0.60, 0.65, 0.65, 0.75, 0.80, 0.70, 0.45, 0.70, None),
}
"""The goals of our time over vLLM's, in the order of `WORKS`."""

ZEN_4, ZEN_5, XEON = "AMD EPYC,", "AMD EPYC (Zen 5),", "Intel"
POLICIES = {
    "round-robin": "round-robin",
    "least-load": "least-load",
    "dynamo": "Dynamo",
    "min-ttft": "Conductor (Mooncake), the same as min-ttft",
    "sglang": "SGLang, cache_aware",
    "aibrix": "AIBrix, prefix-cache",
    "llm-d": "llm-d",
    "prefix-affinity": "prefix-affinity, with thresholds of match and load",
    "formula": "formula of a study of time and duplicate work",
    "ours": "ours",
}
LOADS = [f"synthetic {load}x" for load in ("8", "10", "11.5")]
LOADS += [f"conversation {load}x" for load in ("4", "9.5", "10.5")]

Lines = Iterable[Sequence[object]]
"""A line of headings, then those of cells."""


def peers(cpu: str, cores: int, arrangement: str, servers: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return our median and the first server's, by model and work. A CPU is named by its beginning."""
    sides: dict[tuple[str, str, str], list[float]] = {}
    for line in (RESULTS / "peers.jsonl").read_text().splitlines():
        row = json.loads(line)
        case = row["cores"], row["arrangement"], row["servers"]
        if f"{row['cpu']},".startswith(cpu) and case == (cores, arrangement, servers):
            sides.setdefault((row["model"], row["work"], row["server"]), []).append(row[METRICS[row["work"]]])
    peer = servers.partition(",")[0]
    works = [(model, work) for model, work, server in sides if server == peer]
    return {key: (median(sides[*key, "tidemill"]), median(sides[*key, peer])) for key in works}


def ratio(times: tuple[float, float] | None, goal: float | None = None) -> str:
    """Return our time over the other one, in bold where it reaches its goal."""
    if times is None:
        return ""
    shown = f"{times[0] / times[1]:.2f}"
    return f"**{shown}**" if goal is not None and float(shown) <= goal else shown


def seconds(times: tuple[float, float]) -> str:
    return " / ".join(map(shown, times))


def beside_vllm() -> Lines:
    found = peers(ZEN_4, 1, ONE_THREAD, "vllm, tidemill")
    yield "work", *(f"{model}: {what}" for model in GOALS for what in ("ours / vLLM, s", "ratio", "goal"))
    for index, (work, name) in enumerate(WORKS.items()):
        cells = [(found[model, work], goals[index]) for model, goals in GOALS.items()]
        yield (
            name,
            *(
                cell
                for times, goal in cells
                for cell in (seconds(times), ratio(times, goal), f"{goal:.2f}" if goal else "")
            ),
        )


def elsewhere() -> Lines:
    zen_5 = {(row["model"], row["work"]): (row["ratio"], 1.0) for row in read_rows("peers_zen5")}
    xeon = peers(XEON, 1, ONE_THREAD, "vllm, tidemill")
    llama_cpp = peers(ZEN_4, 1, ONE_THREAD, "llama.cpp, tidemill")
    for key, times in three_servers().items():
        llama_cpp.setdefault(key, times)
    sides = {"vLLM, Zen 5": zen_5, "vLLM, Xeon with AMX": xeon, "llama.cpp, Zen 4": llama_cpp}
    yield "work", *(f"{side}: {model}" for side in sides for model in GOALS)
    for work, name in WORKS.items():
        yield name, *(ratio(found.get((model, work))) for found in sides.values() for model in GOALS)


def three_servers() -> dict[tuple[str, str], tuple[float, float]]:
    """Return ours and llama.cpp's of the runs with three servers."""
    sides: dict[tuple[str, str, str], float] = {}
    for line in (RESULTS / "peers.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["servers"] == "vllm, llama.cpp, tidemill":
            sides[row["model"], row["work"], row["server"]] = row[METRICS[row["work"]]]
    return {
        (model, work): (sides[model, work, "tidemill"], theirs)
        for (model, work, server), theirs in sides.items()
        if server == "llama.cpp"
    }


def two_cores() -> Lines:
    first, last = "first token of 2,048", "four conversations"
    goals = {
        "--mixed 1 --threads 2": {"c=8": 0.65, "c=32": 0.65, first: 0.65, last: 0.45},
        "--prefill 1 --decode 1 --threads 1": {"c=8": 0.80, "c=32": 0.80, first: 1.30},
    }
    yield "our workers", "work", "ours / vLLM, s", "ratio", "goal"
    for arrangement, works in goals.items():
        found, shown = peers(ZEN_4, 2, arrangement, "vllm, tidemill"), f"`{arrangement}`"
        for work, goal in works.items():
            times = found["hybrid", work]
            yield shown, WORKS[work], seconds(times), ratio(times, goal), f"{goal:.2f}"
            shown = ""


def agent_session() -> Lines:
    times = peers(ZEN_4, 1, ONE_THREAD, "vllm with bfloat16 states, tidemill")["hybrid", "agent session"]
    yield "work", "ours / vLLM, s", "ratio", "goal"
    yield "first token of turns 2 to 6", seconds(times), ratio(times, 0.4), "0.40"


def cases() -> Lines:
    """Yield the rows of `CASES`, as measured on a Zen 5."""
    yield "model", "weights, our flags", "beside", "work", "ours / theirs, s", "ratio", "goal"
    for case in CASES:
        cpu = f"{ZEN_5} avx512f{'' if case.older else ' avx512_bf16'},"
        found, names = peers(cpu, 1, case.arrangement, case.servers), _names(case)
        for work, goal in case.goals.items():
            times = found.get((case.model, work))
            cells = seconds(times) if times else "not measured", ratio(times, goal)
            yield *names, (WORKS | MORE_WORKS)[work], *cells, f"{goal:.2f}" if goal else ""
            names = ("",) * len(names)


def _names(case: Case) -> tuple[str, str, str]:
    """Return the first cells of a case: model, weights with our flags, and peer."""
    model, _, kind = case.model.rpartition("-")
    weights = STORED.get(kind, "bfloat16")
    flags = case.arrangement.removeprefix(ONE_THREAD).strip()
    peer = ", ".join(case.peers) + (", no bfloat16 instructions" if case.older else "")
    return model if kind in STORED else case.model, weights + (f", `{flags}`" if flags else ""), peer


def architectures() -> Lines:
    yield "model", "layers", "a token", "in FP8", "a window", "a state", "32,768 tokens"
    for row in read_rows("architectures"):
        sizes = [row[f"bytes_per_{kind}"] for kind in ("token", "token_fp8", "window", "state")]
        whole = f"{row['bytes_of_a_sequence'] / 2**20:,.0f} MiB"
        yield row["model"], row["layers"], *(f"{size:,}" if size else "" for size in sizes), whole


def weights() -> Lines:
    """The size of weights, and the least that holds them with a step and a stream of 32,768 tokens."""
    holders = {f"a laptop of {size} GiB": (size - 4) << 30 for size in (16, 32, 64)}
    cards = sorted(CARDS.values(), key=lambda card: (card.memory_bytes, card.flops_per_s))
    holders |= {card.name: card.memory_bytes for card in cards}
    holders |= {f"{count} x h200": count * CARDS["h200"].memory_bytes for count in (2, 4, 8, 16)}
    yield "model", "bfloat16", "", "`fp8`", "", "`int4`", ""
    for row in read_rows("architectures"):
        cells: list[str] = []
        for num_bytes in row["weight_bytes"].values():
            needed = num_bytes + row["bytes_of_a_sequence"] + STEP_BYTES
            cells += [
                f"{num_bytes / 2**30:,.1f} GiB",
                next(name for name, size in holders.items() if size >= needed),
            ]
        yield row["model"], *cells


def memory(part: str) -> list[Row]:
    return [row for row in read_rows("memory") if row["part"] == part]


def splits() -> Lines:
    found: dict[str, dict[float | None, float]] = {}
    for row in memory("splits"):
        scheme = row["setup"].get("scheme") or {"page_share": None}
        found.setdefault(row["workload"], {})[scheme["page_share"]] = row["figures"]["output_tokens_per_s"]
    shares = sorted(share for share in next(iter(found.values())) if share is not None)
    yield "tokens/s", "elastic", *(f"{share:.0%} pages" for share in shares), "elastic : best"
    for workload, by in found.items():
        static = [by[share] for share in shares]
        yield workload, *(f"{each:,.0f}" for each in (by[None], *static)), f"{by[None] / max(static):.2f}"


def hits() -> Lines:
    found: dict[str, dict[tuple[int, str], float]] = {}
    for row in memory("hits"):
        setup = row["setup"]
        by = found.setdefault(f"{row['workload']}, {row['requests']} requests", {})
        by[setup["num_extents"], setup["policy"]] = row["figures"]["token_hit_rate"]
    yield "share of prompt tokens found, `lru` -> `value`", "small", "middle", "large"
    for workload, by in found.items():
        sizes = sorted({size for size, _ in by})
        yield workload, *(f"{size:,}: {by[size, 'lru']:.3f} -> {by[size, 'value']:.3f}" for size in sizes)


def overload() -> Lines:
    at_rest = {row["setup"]["strategy"]: row["figures"]["slots_per_row"] for row in memory("slots")}
    yield "strategy", "states a stream, at rest", "overloaded", "in flight", "tokens/s", "preemptions"
    for row in memory("overload"):
        strategy, of = row["setup"]["strategy"], row["figures"]
        slots = f"{at_rest[strategy]:.2f}", f"{of['slots_per_row']:.2f}"
        speed = f"{of['in_flight_mean']:.1f}", f"{of['output_tokens_per_s']:,.0f}"
        yield f"`{strategy}`", *slots, *speed, f"{of['preemptions']:.0f}"


def placement(rules: str, policies: dict[str, str]) -> Lines:
    """Yield mean times to the first token, the least of each load in bold."""
    found = {row["case"]: row["mean_s"] for row in read_rows("placement")}
    yield "mean time to the first token, s", *LOADS
    by = {name: [found[f"{load}, {rules}, seed 1: {name}"] for load in LOADS] for name in policies}
    best = [min(column) for column in zip(*by.values(), strict=True)]
    for name, means in by.items():
        shown = [f"{mean:.3f}" if mean < 1 else f"{mean:#.3g}" for mean in means]
        cells = zip(shown, means, best, strict=True)
        yield policies[name], *(f"**{text}**" if mean == least else text for text, mean, least in cells)


def many_routers() -> Lines:
    found = {tuple(row["case"].split(" workers, ")): row for row in read_rows("many_routers")}
    counts = list(dict.fromkeys(workers for workers, _ in found))
    yield "mean time to the first token, s", *(f"{int(workers):,} workers" for workers in counts)
    for way in dict.fromkeys(way for _, way in found):
        rows = [found.get((workers, way)) for workers in counts]
        yield way, *(f"{row['mean_s']:.3f}" if row else "" for row in rows)


def placements() -> Lines:
    """Yield placements a second and core of the process alone, and over gRPC."""
    ways: dict[int, dict[str, float]] = {}
    for row in read_rows("placements"):
        ways.setdefault(row["workers"], {})[row["way"]] = row["per_s"]
    for row in read_rows("placement_calls"):
        ways.setdefault(row["workers"], {})[f"gRPC, {row['waiting']} at a time"] = row["per_s"]
    names = list(dict.fromkeys(name for by in ways.values() for name in by))
    yield "workers", *names
    for workers, by in ways.items():
        yield f"{workers:,}", *(f"{by[name]:,.0f}" if name in by else "" for name in names)


def faults() -> Lines:
    yield "fault", "streams, changed", "pause, s", "noticed, s", "new requests, s"
    for part in read_rows("faults"):
        if part["part"] in ("kills", "ranks"):
            for name, row in part.items():
                if name.startswith(("kill", "SIGSTOP")):
                    spans = [row.get(key) or {} for key in ("pause_s", "noticed_s", "served_s")]
                    times = [", ".join(f"{span[at]:.2g}" for at in ("p50", "max") if span) for span in spans]
                    yield name, f"{row['streams']}, {row['failed'] + row['changed']}", *times


def kinds() -> Lines:
    """Return the time of one row, and ratios."""
    times = {"8 rows, µs", "32 rows, µs", "512 rows, µs"}
    return generic([{k: cell for k, cell in row.items() if k not in times} for row in read_rows("kinds")])


def engines(part: str = "") -> Lines:
    """Yield the figures with this part in their names."""
    yield "figure", "measured", "goal", "of", "on"
    for row in read_rows("engines"):
        shown, goal = f"{row['value']:.4g}", row["goal"]
        if goal is not None and row["value"] <= goal:
            shown = f"**{shown}**"
        if part in row["name"]:
            yield row["name"], shown, "" if goal is None else goal, row["details"], row["cpu"].split(",")[0]


def generic(rows: Sequence[Row]) -> Lines:
    """Return a table of rows as they are."""
    return [tuple(rows[0]), *(tuple(row.values()) for row in rows)]


TABLES: dict[str, tuple[str, Callable[[], Lines]]] = {
    "beside vLLM": ("", beside_vllm),
    "elsewhere": ("", elsewhere),
    "two cores": ("", two_cores),
    "agent session": ("", agent_session),
    "peers by kind": ("", cases),
    "architectures": ("architectures", architectures),
    "kinds": ("kinds", kinds),
    "weights": ("architectures", weights),
    "splits": ("memory", splits),
    "hits": ("memory", hits),
    "overload": ("memory", overload),
    "placement": ("placement", partial(placement, "hybrid", POLICIES)),
    "placement, attention": (
        "placement",
        partial(
            placement,
            "attention",
            {name: name for name in ("min-ttft", "prefix-affinity", "formula", "ours")},
        ),
    ),
    "many routers": ("many_routers", many_routers),
    "placements": ("placement_calls", placements),
    "faults": ("faults", faults),
    "engines": ("engines", engines),
    "kills of engines": ("engines", partial(engines, "cut by a kill")),
}
"""The file whose first line is the caption, and what makes a table. Any other file is shown as it is."""


def table(name: str) -> str:
    """Return the caption and the table of this name."""
    file, lines = TABLES.get(name, (name, lambda: generic(read_rows(name))))
    head, *body = ([str(cell) for cell in line] for line in lines())
    rows = [f"| {' | '.join(cells)} |".replace("  ", " ") for cells in (head, *body)]
    rows.insert(1, "|---" * len(head) + "|")
    caption = ""
    if file:
        about = json.loads((RESULTS / f"{file}.jsonl").read_text().partition("\n")[0])
        words = f"`{about['command']}`" if about["command"].startswith("python") else about["command"]
        parts = ", ".join(each for each in (words, about["cpu"], about["date"]) if each)
        caption = textwrap.fill(parts + ":", WIDTH, break_on_hyphens=False) + "\n\n"
    return caption + "\n".join(rows) + "\n"


def filled(page: str) -> str:
    """Return a page with its tables as the results have them."""
    return MARKED.sub(lambda match: f"{match[1]}{table(match[2])}", page)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
