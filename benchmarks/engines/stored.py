"""vLLM with the connector beside vLLM alone: what saving costs, and what loading saves."""

import json
from collections.abc import Iterator
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.engines.scene import Figure, Scene, ask, prompts

ROUNDS = 8
PROMPT_TOKENS = 2048
ANSWER_TOKENS = 64


def stored(scene: Scene) -> Iterator[Figure]:
    """Yield figures of new prompts on a server that saves them beside one without a store, and of the same
    prompts on a second server."""
    rng = Random(2)
    asked = prompts(rng, ROUNDS, PROMPT_TOKENS)
    with TemporaryDirectory(dir=scene.folder) as folder:
        flags = "--kv-transfer-config", connector(f"file://{folder}?size=8GiB")
        alone_s: list[float] = []
        saving_s: list[float] = []
        cold_s: list[float] = []
        with scene.vllm() as alone, scene.vllm(*flags) as first:
            for prompt in asked:
                answers = ask(alone.url, [prompt], ANSWER_TOKENS)
                alone_s.append(answers.wall_s)
                cold_s.append(answers.first_token_s)
                saving_s.append(ask(first.url, [prompt], ANSWER_TOKENS).wall_s)
        yield Figure(
            f"time of a prompt of {PROMPT_TOKENS:,} and its answer, saved by not saved",
            median(saving_s) / median(alone_s),
            1.05,
            f"medians {median(saving_s):.2f} and {median(alone_s):.2f} s",
        )
        with scene.vllm(*flags) as second:
            loaded_s = [ask(second.url, [prompt], ANSWER_TOKENS).first_token_s for prompt in asked]
        yield Figure(
            f"first token of {PROMPT_TOKENS:,} on a second server by cold",
            median(loaded_s) / median(cold_s),
            0.4,
            f"medians {median(loaded_s):.2f} and {median(cold_s):.2f} s",
        )


def connector(store: str) -> str:
    """Return the value of --kv-transfer-config for a store."""
    return json.dumps(
        {
            "kv_connector": "TidemillConnector",
            "kv_connector_module_path": "tidemill.connect.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": store},
        }
    )
