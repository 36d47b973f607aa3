"""The options of `tidemill bench`: those of `vllm bench serve`, and SGLang's for shared prefixes."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from math import inf, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tidemill.cluster.bench.files import ShareGptFile, TraceFile
from tidemill.cluster.bench.workloads import FIRST_TOKEN, SHAPES, Shape
from tidemill.cluster.cli.options.arguments import Option, UsageError, check_above_zero, named
from tidemill.cluster.cli.security import KEY_VARIABLE, SERVER_URL, server_address

if TYPE_CHECKING:
    from tidemill.cluster.bench.command import BenchOptions

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
GSP = "generated-shared-prefix"
FILES = ("sharegpt", "trace")
DATASETS = (*SHAPES, GSP, *FILES)
METRICS = ("ttft", "tpot", "itl", "e2el")

LOAD: tuple[Option, ...] = (
    (
        "--backend",
        {"default": "openai", "choices": [*ENDPOINTS]},
        "chat or completion, which select the endpoint",
    ),
    ("--endpoint", {"metavar": "PATH"}, "path of the endpoint, instead of the backend's"),
    ("--model", {"metavar": "NAME"}, "model to ask (the first that the server lists)"),
    ("--insecure", {"action": "store_true"}, "accept any certificate of the server"),
    ("--dataset-name", {"default": "random", "choices": DATASETS, "metavar": "NAME"}, ", ".join(DATASETS)),
    ("--dataset-path", {"type": Path, "metavar": "FILE"}, "file of sharegpt and trace"),
    (
        "--num-prompts",
        {"type": int, "default": 1000, "metavar": "N"},
        "prompts of random, sharegpt, trace",
    ),
    (
        "--request-rate",
        {"type": float, "default": inf, "metavar": "R"},
        "requests per second; inf: all now",
    ),
    (
        "--burstiness",
        {"type": float, "default": 1.0, "metavar": "X"},
        "shape of the gamma distribution of arrivals; 1: a Poisson process, less: burstier, inf: even",
    ),
    ("--max-concurrency", {"type": int, "metavar": "N"}, "most requests at a time"),
    (
        "--self-timed",
        {"action": argparse.BooleanOptionalAction},
        "arrivals of the trace, scaled to --request-rate if given; the default of trace",
    ),
    (
        "--num-warmups",
        {"type": int, "default": 0, "metavar": "N"},
        "requests before, not measured",
    ),
    ("--seed", {"type": int, "default": 0, "metavar": "N"}, "another seed has prompts that no cache has"),
    ("--vocab-size", {"type": int, "metavar": "N"}, "size of the vocabulary, if the server does not list it"),
    ("--ignore-eos", {"action": "store_true"}, "answers have their full length; not every server knows this"),
    ("--temperature", {"type": float, "metavar": "X"}, "sampling temperature (the server's default)"),
    ("--top-p", {"type": float, "metavar": "X"}, "nucleus sampling (the server's default)"),
    ("--top-k", {"type": int, "metavar": "N"}, "top-k sampling (the server's default)"),
    ("--extra-body", {"metavar": "JSON"}, "object of more fields of each body"),
    ("--hints", {"action": "store_true"}, "send the hints of agents on what to keep, to Tidemill"),
    (
        "--goodput",
        {"nargs": "+", "default": [], "metavar": "METRIC:MS"},
        f"count requests within these milliseconds, of {', '.join(METRICS)}; itl bounds the longest gap",
    ),
    ("--metric-percentiles", {"default": "50,90,99", "metavar": "LIST"}, "percentiles of each metric"),
    ("--disable-tqdm", {"action": "store_true"}, "show no progress bar"),
    ("--json", {"dest": "as_json", "action": "store_true"}, "print JSON"),
    (
        "--result-filename",
        {"dest": "result_file", "type": Path, "metavar": "FILE"},
        "write JSON with the times of each request",
    ),
    ("--plot", {"type": Path, "metavar": "FILE"}, "write a picture; needs tidemill[plot]"),
)


def add_bench_options(
    command: argparse.ArgumentParser, environ: Mapping[str, str], clock_s: Callable[[], float]
) -> None:
    """Add the options and set `run`, which imports the client when it is called."""
    url_help = f"the server (a detached one of this machine, or {SERVER_URL})"
    command.add_argument("--base-url", "--url", dest="url", metavar="URL", help=url_help)
    command.add_argument("--api-key", metavar="KEY", help=f"its API key (${KEY_VARIABLE})")
    for option, shape, text in LOAD:
        has_default = "default" in shape and shape["default"] != []
        command.add_argument(option, **shape, help=text + (" (%(default)s)" if has_default else ""))
    shapes = command.add_argument_group("shapes of the datasets")
    for dataset, shape in SHAPES.items():
        defaults: dict[str, float] = asdict(shape())
        for size in fields(shape):
            if not size.metadata:
                continue
            short, default = size.name.replace("_", "-"), defaults[size.name]
            names = [f"--{dataset}-{short}", *([f"--{short}"] if dataset == "random" else [])]
            text = f"{size.metadata['text']} (%(default)s)"
            shapes.add_argument(*names, type=type(default), default=default, metavar="N", help=text)
    shapes.add_argument("--gsp-ordered", action="store_true", help="send group after group, not shuffled")
    shapes.add_argument(
        "--sharegpt-output-len", type=int, metavar="N", help="tokens of an answer (about as in the file)"
    )

    def run(options: argparse.Namespace) -> int:
        from tidemill.cluster.bench.command import bench  # noqa: PLC0415 - imports httpx

        return bench(bench_options_of(options, environ), clock_s)

    command.set_defaults(run=run)


def bench_options_of(options: argparse.Namespace, environ: Mapping[str, str]) -> "BenchOptions":
    """Return the checked options. Raises UsageError."""
    from tidemill.cluster.bench.command import BenchOptions  # noqa: PLC0415 - imports httpx

    counts = ("num_prompts", "max_concurrency", "request_rate", "burstiness", "sharegpt_output_len")
    check_above_zero(options, *counts)
    if options.num_warmups < 0:
        raise UsageError(f"--num-warmups {options.num_warmups}: set it to 0 or more")
    if options.vocab_size is not None and options.vocab_size <= FIRST_TOKEN:
        raise UsageError(f"--vocab-size {options.vocab_size}: set it above {FIRST_TOKEN}")
    endpoint = options.endpoint or ENDPOINTS[options.backend]
    if options.hints and endpoint.endswith("/chat/completions"):
        raise UsageError("--hints are depths in tokens: use them with --backend openai")
    address = server_address(options, environ)
    computed: dict[str, Any] = {
        "url": address.url,
        "api_key": address.api_key,
        "verify": not options.insecure,
        "endpoint": endpoint,
        "source": _source(options),
        "fields": _fields(options),
        "goodput_ms": _goodput_ms(options.goodput),
        "percentiles": _percentiles(options.metric_percentiles),
        "shows_progress": sys.stderr.isatty() and not options.disable_tqdm,
    }
    return BenchOptions(**named(options, BenchOptions) | computed)


def _source(options: argparse.Namespace) -> Shape | ShareGptFile | TraceFile:
    """Return the shape or the file of the workload. Raises UsageError."""
    dataset = "gsp" if options.dataset_name == GSP else options.dataset_name
    path, num_prompts = options.dataset_path, options.num_prompts
    if (dataset in FILES) != (path is not None):
        raise UsageError(f"--dataset-name {dataset}: give --dataset-path with {' and '.join(FILES)} alone")
    if dataset == "sharegpt":
        return ShareGptFile(path=path, num_prompts=num_prompts, output_len=options.sharegpt_output_len)
    if dataset == "trace":
        return TraceFile(path=path, num_prompts=num_prompts)
    prefix = f"{dataset.replace('-', '_')}_"
    given: dict[str, Any] = {"num_prompts": num_prompts} if dataset == "random" else {}
    for size in fields(SHAPES[dataset]):
        value: float = given.setdefault(size.name, getattr(options, prefix + size.name, 0))
        option, least = f"--{(prefix + size.name).replace('_', '-')}", size.metadata.get("least", 0)
        if value < least:
            raise UsageError(f"{option} {value}: set it to {least} or more")
        if size.name == "range_ratio" and value > 1:
            raise UsageError(f"{option} {value}: set it to 1 or less")
    return SHAPES[dataset](**given)


def _fields(options: argparse.Namespace) -> dict[str, object]:
    """Return the fields of each body. Raises UsageError."""
    try:
        extra: object = json.loads(options.extra_body or "{}")
    except ValueError as error:
        raise UsageError(f"--extra-body {options.extra_body}: {error}: give a JSON object") from error
    if not isinstance(extra, dict):
        raise UsageError(f"--extra-body {options.extra_body}: give a JSON object")
    named = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
    return {
        **{name: value for name, value in named.items() if value is not None},
        **({"ignore_eos": True} if options.ignore_eos else {}),
        **cast("dict[str, object]", extra),
    }


def _goodput_ms(pairs: Sequence[str]) -> dict[str, float]:
    """Parse METRIC:MS. Raises UsageError."""
    targets: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        value = _number(text)
        if name not in METRICS or value is None or value <= 0:
            raise UsageError(
                f"--goodput {pair}: write it like ttft:500, of {', '.join(METRICS)} in milliseconds"
            )
        targets[name] = value
    return targets


def _percentiles(text: str) -> tuple[float, ...]:
    values = [_number(part) for part in text.split(",")]
    found = tuple(value for value in values if value is not None and 0 <= value <= 100)
    if len(found) != len(values):
        raise UsageError(f"--metric-percentiles {text}: write them like 50,90,99.9")
    return found


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if isnan(value) else value
