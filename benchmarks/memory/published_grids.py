"""The gain from publishing grids: simulated hybrid workers with a store, with publishing and without it.

    python -m benchmarks.memory.published_grids [--policy round-robin] [--gap 4] [--store 256GiB]
    python -m benchmarks.memory.published_grids --agents 8 --store 64GiB --policy ours

Families have two prompts of 24 blocks that share 21, a random gap apart, and no hints. With `round-robin`
the second one is always on the other worker. `--agents` replays the trace of agents instead.
"""

import argparse
from collections.abc import Sequence
from random import Random
from unittest.mock import patch

from tidemill.cluster.simulate.agents import agents_trace
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest, reusable_share, speed_up
from tidemill.cluster.simulate.world import simulate
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.engine.publisher import Publisher

FAMILIES = 60
SHARED_BLOCKS, OWN_BLOCKS = 21, 3
ANSWER_TOKENS = 64


def families(gap_s: float, rng: Random) -> list[TraceRequest]:
    """Return pairs of prompts, one after the other."""
    names, at_s, requests = iter(range(1 << 40)), 0.0, list[TraceRequest]()
    for _ in range(FAMILIES):
        shared = [next(names) for _ in range(SHARED_BLOCKS)]
        for _ in range(2):
            blocks = (*shared, *(next(names) for _ in range(OWN_BLOCKS)))
            requests.append(TraceRequest(at_s, len(blocks) * BLOCK_TOKENS - 100, ANSWER_TOKENS, blocks))
            at_s += rng.expovariate(1 / gap_s)
    return requests


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=1500, help="memory of each of the two workers")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds between prompts of families")
    parser.add_argument("--policy", default="round-robin")
    parser.add_argument("--store", type=parse_bytes, default=256 << 30)
    options = parser.parse_args(arguments)
    rng = Random(1)
    agents = speed_up(agents_trace(options.agents, 2, rng), 0.5)
    requests = agents if options.agents else families(options.gap, rng)
    setup = Setup(
        prefill=0, decode=0, mixed=2, hybrid=True, hints="none",
        policy=options.policy, blocks=options.blocks, store_bytes=options.store,
    )  # fmt: skip
    print(f"{options}: {reusable_share(requests):.3f} of the prompt tokens can be found")
    for published in (False, True):
        with patch.object(
            Publisher, "publish_grids", Publisher.publish_grids if published else _publish_nothing
        ):
            figures = simulate(requests, setup).figures()
        times = figures["ttft_ms"]
        print(
            f"| {'published' if published else 'kept'} | {figures['hit_ratio']:.3f} "
            f"| {figures['fetched_ratio']:.3f} | {times['mean']:.0f} | {times['p99']:.0f} |"
        )


def _publish_nothing(publisher: Publisher) -> None:
    del publisher


if __name__ == "__main__":
    main()
