"""Differences of a model's logprobs, by length, with memory in fewer bits.

    python -m benchmarks.engine.state_dtype MODEL [--tokens 16384]
    python -m benchmarks.engine.state_dtype MODEL --option kv_cache_dtype bfloat16 fp8_per_token_head

A prompt of random tokens, or a text, runs with two values of an option: states in float32 and in bfloat16, if
none is given. The table has, of the tokens in each range of depths, the mean and the largest difference
between the two logprobs of the prompt's own token, and how much larger the perplexity is with the second.
"""

import argparse
import random
from itertools import pairwise
from math import expm1
from pathlib import Path
from typing import Any

from tidemill import LLM, SamplingParams
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer

ENDS = (1, 1_024, 4_096, 8_192, 16_384, 32_768, 65_536)


def logprobs(model: str, option: str, value: str, tokens: list[int]) -> list[float]:
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    options: dict[str, Any] = {option: None if value == "none" else value}
    with LLM(model, **options, memory="4GiB", max_model_len=len(tokens) + 1) as llm:
        (output,) = llm.generate([tokens], asked)
    assert output.prompt_logprobs is not None
    return [next(iter(scores.values())).logprob for scores in output.prompt_logprobs if scores]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--text", type=Path, help="a file instead of random tokens")
    parser.add_argument("--option", nargs=3, default=("state_dtype", "float32", "bfloat16"))
    options = parser.parse_args()
    draw = random.Random(0)
    tokens = [draw.randrange(10, 500) for _ in range(options.tokens)]
    if options.text:
        tokens = load_tokenizer(Path(options.model)).encode(options.text.read_text())[: options.tokens]
    name, *values = options.option
    exact, rounded = (logprobs(options.model, name, value, tokens) for value in values)
    apart = [b - a for a, b in zip(exact, rounded, strict=True)]
    print("| depth | mean difference | largest | loss of perplexity |\n|---|---|---|---|")
    for start, end in pairwise(ENDS):
        if some := apart[start - 1 : end - 1]:
            sizes, loss = [abs(each) for each in some], expm1(-sum(some) / len(some))
            depth = f"{start:,} to {start + len(some):,}"
            print(f"| {depth} | {sum(sizes) / len(some):.4f} | {max(sizes):.3f} | {loss:.2%} |")


if __name__ == "__main__":
    main()
