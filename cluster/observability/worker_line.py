"""One log line per worker and ten seconds, in the words of vLLM's."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from tidemill.kvstore.periodic import every
from tidemill.workers.messages import WorkerLoad

LINE_S = 10.0

log = logging.getLogger(__name__)


def line_of(before: WorkerLoad, now: WorkerLoad, over_s: float) -> str | None:
    """Return the line for a load and the one `over_s` seconds before; None: an idle worker did not change."""
    steps = {"steps": now.counters.get("steps", 0.0)}  # the idle ones count as well
    same = replace(before, counters=before.counters | steps) == now
    if same and not (now.running_rows or now.waiting_rows):
        return None

    def grown(name: str) -> float:
        return max(0.0, now.counters.get(name, 0.0) - before.counters.get(name, 0.0))

    queried = grown("prefix_queried_tokens")
    hits = f"{grown('prefix_resumed_tokens') / queried:.1%}" if queried else "-"
    peak_bytes = int(now.counters.get("torch_reserved_peak_bytes", 0))
    reserved = f", reserved by torch at most: {_mib(peak_bytes)} MiB" if peak_bytes else ""
    return (
        f"prompt throughput: {grown('computed_tokens') / over_s:.1f} tokens/s,"
        f" generation throughput: {grown('generated_tokens') / over_s:.1f} tokens/s,"
        f" running: {now.running_rows} reqs, waiting: {now.waiting_rows} reqs,"
        f" memory: {_memory(now.memory)} of {_mib(now.budget_bytes)} MiB, prefix cache hit rate: {hits}"
        f"{reserved}"
    )


def _memory(use: Mapping[str, int]) -> str:
    names = [name.removesuffix("_live") for name in use if name.endswith("_live")]
    return ", ".join(
        f"{name} {_mib(use[f'{name}_live'])} live + {_mib(use[f'{name}_cached'])} cached"
        for name in names
        if use[f"{name}_live"] or use[f"{name}_cached"] or name == "pages"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"


async def log_lines(name: str, load_of: Callable[[], WorkerLoad]) -> None:
    """Log the line of a worker every LINE_S seconds until cancelled."""
    last: tuple[WorkerLoad, float] | None = None

    async def look() -> None:
        nonlocal last
        load, at_s = load_of(), asyncio.get_running_loop().time()
        line = None if last is None else line_of(last[0], load, at_s - last[1])
        if line is not None:
            log.info("%s: %s", name, line)
        last = load, at_s

    await every(LINE_S, look, "worker line")
