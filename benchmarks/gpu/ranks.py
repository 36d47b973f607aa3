"""Two ranks of keeper answer as one rank does: on one GPU over gloo, or on two over NCCL.

    python -m benchmarks.gpu.ranks gloo|nccl|one-shot|ahead [--device cpu]

`one-shot` sums small tensors in one launch, `ahead` launches a step before the one before it has ended. The
exit status is 1 when a greedy answer differs.
"""

import argparse
import sys
import time
from operator import eq
from typing import Any

from tidemill import LLM, SamplingParams

PROMPTS = [[(7919 * prompt + 31 * at) % 880 + 3 for at in range(20 + 37 * prompt)] for prompt in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=48)
WORKER: dict[str, Any] = {
    "backing": "fixed",
    "memory": "128MiB",
    "kv_cache_dtype": "float32",
    "max_num_seqs": 8,
}
WAYS: dict[str, dict[str, Any]] = {
    "gloo": {
        "tensor_parallel_backend": "gloo",
        "tensor_parallel_reduce": "fast",
        "enforce_eager": True,
        "device_share": 0.5,
    },
    "nccl": {},
    "one-shot": {"tensor_parallel_one_shot": "256KiB"},
    "ahead": {"async_scheduling": True},
}


def answers(device: str, **settings: Any) -> tuple[list[list[int]], float]:  # noqa: ANN401  fields of EngineSettings
    """Return the tokens of all answers, and the seconds of the second time that they were computed."""
    with LLM("keeper", device=device, **WORKER, **settings) as llm:
        took_s = 0.0
        for _ in range(2):
            start_s = time.perf_counter()
            found = llm.generate(PROMPTS, GREEDY, progress=False)
            took_s = time.perf_counter() - start_s
        return [list(output.outputs[0].token_ids) for output in found], took_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    wanted, alone_s = answers(args.device)
    found, group_s = answers(args.device, tensor_parallel_size=2, **WAYS[args.way])
    equal = sum(map(eq, wanted, found))
    print(f"{equal} of {len(wanted)} answers equal; one rank {alone_s:.2f} s, two {group_s:.2f} s")
    return int(equal < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
