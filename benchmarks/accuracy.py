# pyright: basic
# Settings are replaced by name.
"""The accuracy of a served model: whether its paths agree, and its score in GSM8K.

    python -m benchmarks.accuracy FOLDER [--only kl|gsm8k] [--prompts 200] [--device cuda] [--memory 1GiB]

Prompts that branch are answered on four paths, and the distributions of their tokens are compared with those
of the first path by the Kullback-Leibler divergence:
    cold     each prompt is computed, and nothing is reused
    warm     prompts reuse what others left in memory
    fetched  another engine computed and stored the prompt
    resumed  another engine continues the answer in its middle, as after the loss of a worker
On CPU it must be 0: the exit status is 1 otherwise. A device adds up in other orders on other paths.

GSM8K is scored by lm-eval over HTTP (`pip install 'tidemill[accuracy]'`).
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import takewhile
from math import exp, inf, log
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from tests.support.parity.served import serving

from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.cluster.offline.llm import settings_of
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.messages import Request, Sampling, TokenLogprob
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled

ROOT = Path(__file__).parents[1]
FAMILY = 10
STEM_PAGES = (2, 12)
TAIL_TOKENS = 48
NEW_TOKENS = 16
ALTERNATIVES = 20
REST_LEAST = 1e-15
"""The least probability of the tokens that are not listed: a sum of listed ones may be rounded to 1."""

STORE = "store_url"
COLUMNS = ("positions", "differ", "KL mean", "KL max", "reused", "fetched")
GSM8K_GOAL = "exact_match,flexible-extract"


class MissingError(Exception):
    """Something that GSM8K needs is not here; the text has the commands that get it."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The greedy answer to a prompt, with the most likely tokens at each of its positions."""

    tokens: list[int]
    scores: list[TokenLogprob]
    reused: int
    fetched: int


Answers = dict[str, Drawn]


def prompts_of(text: Sequence[int], page_tokens: int, count: int, seed: int = 0) -> list[Request]:
    """Return requests in families that share a stem and leave it at depths of their own."""
    draw, requests = Random(seed), []
    stem: Sequence[int] = ()
    for index in range(count):
        if not index % FAMILY:
            at, pages = draw.randrange(len(text)), draw.randint(*STEM_PAGES)
            stem = [*text, *text][at : at + pages * page_tokens]
        depth, at = draw.randint(page_tokens, len(stem)), draw.randrange(len(text))
        tail = [*text, *text][at : at + draw.randint(1, TAIL_TOKENS)]
        sampling = Sampling(temperature=0.0, logprobs=ALTERNATIVES)
        requests.append(
            Request(
                request_id=str(index),
                tokens=(*stem[:depth], *tail),
                max_new_tokens=NEW_TOKENS,
                sampling=sampling,
            )
        )
    return requests


def divergence(wanted: TokenLogprob, found: TokenLogprob) -> float:
    """Return KL(wanted || found) in nats, over the tokens that both list and the rest as one more token.

    That is at most the divergence of the whole distributions, 0 for equal ones, and infinite where no token
    is in both lists.
    """
    if wanted == found:
        return 0.0
    p, q = dict(wanted.top), dict(found.top)
    parts = [(p[token], q[token]) for token in p.keys() & q.keys()]
    if not parts:
        return inf
    rest = [log(max(1 - sum(map(exp, side)), REST_LEAST)) for side in zip(*parts, strict=True)]
    return sum(exp(a) * (a - b) for a, b in [*parts, (rest[0], rest[1])])


async def drawn(built: BuiltEngine, request: Request) -> Drawn:
    tokens: list[int] = []
    scores: list[TokenLogprob] = []
    reused = fetched = 0
    async for delta in built.engine.generate(request):
        tokens += delta.tokens
        scores += delta.logprobs
        if delta.provenance:
            reused, fetched = delta.provenance.reused_tokens, delta.provenance.fetched_tokens
    return Drawn(tokens, scores, reused, fetched)


async def cold(settings: EngineSettings, asked: Sequence[Request]) -> Answers:
    async with serving(settings) as built:
        return {
            request.request_id: await drawn(built, replace(request, salt=request.request_id))
            for request in asked
        }


async def warm(settings: EngineSettings, asked: Sequence[Request]) -> Answers:
    """Answer all prompts twice, and keep the second answers."""
    async with serving(settings) as built:
        for request in asked:
            await drawn(built, request)
        return {request.request_id: await drawn(built, request) for request in asked}


async def fetched(settings: EngineSettings, asked: Sequence[Request], store: dict[str, Any]) -> Answers:
    async with serving(settings, **store) as prefill:
        for request in asked:
            await prefill.engine.produce(request)
    found: Answers = {}
    async with serving(settings, **store) as decode:
        for request in asked:
            found[request.request_id] = await drawn(decode, request)
    return found


async def resumed(
    settings: EngineSettings, asked: Sequence[Request], store: dict[str, Any], wanted: Answers
) -> Answers:
    """Return whole answers: the first half of each from `wanted`, the rest from another engine."""
    found: Answers = {}
    async with serving(settings, **store) as built:
        for request in asked:
            before = wanted[request.request_id]
            done = len(before.tokens) // 2
            rest = await drawn(
                built,
                replace(
                    request,
                    tokens=request.tokens + tuple(before.tokens[:done]),
                    max_new_tokens=request.max_new_tokens - done,
                    drawn=done,
                ),
            )
            found[request.request_id] = replace(
                rest,
                tokens=before.tokens[:done] + rest.tokens,
                scores=before.scores[:done] + rest.scores,
            )
    return found


def compared(wanted: Answers, found: Answers) -> dict[str, float]:
    """Return figures over all positions whose earlier tokens are equal."""
    values: list[float] = []
    for name, drawn_wanted in wanted.items():
        pairs = zip(drawn_wanted.tokens, found[name].tokens, strict=True)
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        scores = zip(drawn_wanted.scores, found[name].scores, strict=True)
        values += [divergence(a, b) for a, b in list(scores)[: equal + 1]]
    return {
        "positions": len(values),
        "answers_that_differ": sum(found[name].tokens != wanted[name].tokens for name in wanted),
        "kl_mean": sum(values) / len(values),
        "kl_max": max(values),
        "reused_tokens": sum(answer.reused for answer in found.values()),
        "fetched_tokens": sum(answer.fetched for answer in found.values()),
    }


def paths(settings: EngineSettings, text: Sequence[int], count: int) -> dict[str, dict[str, float]]:
    """Return the figures of each path beside the cold one."""

    async def main() -> dict[str, Answers]:
        asked = prompts_of(text, settings.page_tokens, count)
        assert any(restorable_end(len(request.tokens), settings.page_tokens) for request in asked)
        with TemporaryDirectory() as folder:
            store = {STORE: f"file://{folder}/store?size=8GiB"}
            found = {"cold": await cold(settings, asked), "warm": await warm(settings, asked)}
            found["fetched"] = await fetched(settings, asked, store)
            found["resumed"] = await resumed(settings, asked, store, found["cold"])
        return found

    answers = asyncio.run(main())
    return {name: compared(answers["cold"], found) for name, found in answers.items()}


def text_of(folder: Path) -> list[int]:
    """Return the project's own pages as tokens of the model."""
    pages = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = load_tokenizer(folder)
    return [token for page in pages for token in tokenizer.encode(page.read_text()[:20_000])]


def lm_eval_command(folder: Path, name: str, url: str, limit: int | None, output: Path) -> list[str]:
    """Return lm-eval's command for the model that is served as `name` and has its tokenizer in `folder`."""
    model = {"model": name, "base_url": f"{url}/v1/completions", "num_concurrent": 16}
    model |= {"tokenizer_backend": "huggingface", "tokenizer": folder, "tokenized_requests": False}
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "gsm8k"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += ["--output_path", str(output), *(["--limit", str(limit)] if limit else [])]
    return command


def check_gsm8k() -> None:
    """Raise MissingError where lm-eval or its data set is missing."""
    if find_spec("lm_eval") is None:
        raise MissingError("lm-eval is not installed: pip install 'tidemill[accuracy]', or use --only kl")
    import datasets  # noqa: PLC0415  # pyright: ignore[reportMissingImports] - lm-eval brings it

    try:
        datasets.load_dataset("openai/gsm8k", "main")
    except Exception as error:
        raise MissingError(
            "the data set openai/gsm8k is neither in the cache of Hugging Face nor reachable: on a machine"
            " with a network run `hf download --repo-type dataset openai/gsm8k`, copy ~/.cache/huggingface"
            f" here, or use --only kl ({error!r:.200})"
        ) from error


def gsm8k(folder: Path, options: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Return lm-eval's figures. Raises MissingError, and CalledProcessError when lm-eval fails."""
    check_gsm8k()
    from tests.support.e2e.server import Server  # noqa: PLC0415 - reads Ray's environment

    with TemporaryDirectory() as scratch:
        output = Path(scratch)
        server = Server([str(folder), "--port", "0", *options], output / "server.log")
        try:
            (served,) = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
            command = lm_eval_command(folder, served["id"], server.url, limit, output / "lm-eval")
            subprocess.run(command, check=True, env=os.environ | {"OPENAI_API_KEY": "none"})  # noqa: S603
        finally:
            server.kill_everything()
        (result,) = (output / "lm-eval").rglob("results_*.json")
        return json.loads(result.read_text())["results"]["gsm8k"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="a Hugging Face folder, or keeper")
    parser.add_argument("--only", choices=("kl", "gsm8k"))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--limit", type=int, help="questions of GSM8K (all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", default="1GiB")
    args = parser.parse_args(arguments)
    folder, failed = bundled().get(args.folder) or Path(args.folder), False
    if args.only != "gsm8k":
        settings = settings_of(folder, {"memory": args.memory, "device": args.device, "backing": "fixed"})
        found = paths(settings, text_of(folder), args.prompts)
        print(f"{'path':10}" + "".join(f"{column:>10}" for column in COLUMNS))
        for name, row in found.items():
            print(f"{name:10}" + "".join(f"{value:10.4g}" for value in row.values()))
        off = any(row["kl_max"] or row["answers_that_differ"] for row in found.values())
        failed = off and args.device == "cpu"
    if args.only != "kl":
        try:
            options = ("--device", args.device, "--memory", args.memory)
            found_gsm8k = gsm8k(folder, options, args.limit)
        except MissingError as error:
            parser.error(str(error))
        print(f"GSM8K {GSM8K_GOAL}: {found_gsm8k[GSM8K_GOAL]:.4f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
