"""Differences of a model's logprobs, by length, with recurrent states in bfloat16.

    python -m benchmarks.engine.state_dtype MODEL [--tokens 16384]

A prompt of random tokens runs with states in float32 and in bfloat16. The table has, of the tokens in each
range of depths, the mean and the largest difference between the two logprobs of the prompt's own token.
"""

import argparse
import random
from itertools import pairwise

from tidemill import LLM, SamplingParams

ENDS = (1, 1_024, 4_096, 8_192, 16_384, 32_768, 65_536)


def logprobs(model: str, state_dtype: str, tokens: list[int]) -> list[float]:
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(model, state_dtype=state_dtype, memory="4GiB", max_model_len=len(tokens) + 1) as llm:
        (output,) = llm.generate([tokens], asked)
    assert output.prompt_logprobs is not None
    return [next(iter(scores.values())).logprob for scores in output.prompt_logprobs if scores]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=16_384)
    options = parser.parse_args()
    draw = random.Random(0)
    tokens = [draw.randrange(10, 500) for _ in range(options.tokens)]
    exact, rounded = (logprobs(options.model, dtype, tokens) for dtype in ("float32", "bfloat16"))
    apart = [abs(a - b) for a, b in zip(exact, rounded, strict=True)]
    print("| depth | mean difference | largest |\n|---|---|---|")
    for start, end in pairwise(ENDS):
        if some := apart[start - 1 : end - 1]:
            print(f"| {start:,} to {start + len(some):,} | {sum(some) / len(some):.4f} | {max(some):.3f} |")


if __name__ == "__main__":
    main()
